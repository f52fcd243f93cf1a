"""Which engines switch, at which length, and what is refused: on objects that look like vLLM's configuration."""

import json
from types import SimpleNamespace

import pytest

from longrope2.errors import LongRopeError
from longrope2.serving import plugin
from longrope2.serving.settings import (
    RESOLVED,
    SCHEDULERS,
    WORKER,
    SwitchSettings,
    apply,
    check_methods,
    refuse_unsupported,
    resolve,
    settings_of,
)

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.0],
    "long_factor": [2.0, 3.0],
    "original_max_position_embeddings": 64,
}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
ONE_SIDE = {**LONGROPE, "short_factor": [2.0, 3.0]}


def engine_config(rope=LONGROPE, *, window=512, options=None, recorded=None, model=None, parallel=None, **changes):
    text = {"rope_parameters": rope, "max_position_embeddings": 512}
    text |= {"longrope2": {"switch_length": recorded}} if recorded else {}
    of_model = {
        "hf_text_config": SimpleNamespace(**text, to_dict=lambda: text),
        "max_model_len": window,
        "is_multimodal_model": False,
        "is_encoder_decoder": False,
        "is_hybrid": False,
        "uses_mrope": False,
        "runner_type": "generate",
        "using_transformers_backend": lambda: False,
        **(model or {}),
    }
    of_parallel = {
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "use_ubatching": False,
        "worker_cls": "vllm.v1.worker.gpu_worker.Worker",
        **(parallel or {}),
    }
    values = {
        "model_config": SimpleNamespace(**of_model),
        "parallel_config": SimpleNamespace(**of_parallel),
        "scheduler_config": SimpleNamespace(scheduler_cls=None, async_scheduling=True),
        "speculative_config": None,
        "kv_transfer_config": None,
        "additional_config": {} if options is None else {"longrope2": options},
        **changes,
    }
    return SimpleNamespace(**values)


def length_of(*args, **kwargs):
    settings = resolve(engine_config(*args, **kwargs))
    return settings and settings.switch_length


class TestWhoSwitches:
    def test_only_models_with_two_sides(self):
        assert length_of() == 64
        assert length_of(PLAIN) is None
        assert length_of(ONE_SIDE) is None
        assert length_of({**ONE_SIDE, "short_mscale": 1.0, "long_mscale": 1.2}) == 64
        assert length_of({**ONE_SIDE, "short_mscale": 1.2, "long_mscale": 1.2}) is None
        assert length_of({}) is None
        assert resolve(engine_config(model_config=None)) is None
        assert length_of(model={"is_submodel_config": True}) is None

    def test_layers_of_several_kinds(self):
        settings = resolve(engine_config({"full_attention": LONGROPE, "sliding_attention": PLAIN}))
        assert settings == SwitchSettings(switch_length=64, original_length=64, has_other_layers=True)
        assert length_of({"full_attention": ONE_SIDE, "sliding_attention": PLAIN}) is None
        with pytest.raises(LongRopeError, match=r"different original windows \[64, 128\]"):
            length_of({"full_attention": LONGROPE, "other": {**LONGROPE, "original_max_position_embeddings": 128}})

    def test_the_length_is_the_option_or_what_the_export_records_or_the_original_window(self):
        assert length_of(recorded=48) == 48
        assert length_of(recorded=48, options={"switch_length": 100}) == 100
        assert length_of(recorded=48, options={"switch": True}) == 48
        assert length_of(options={"switch": False}) is None

    @pytest.mark.parametrize(
        ("window", "length", "switches"),
        [(64, 64, False), (65, 64, True), (64, 48, True), (48, 48, False), (65, 100, True), (64, 100, False)],
    )
    def test_vllm_alone_is_right_in_a_window_that_is_short_for_both(self, window, length, switches):
        assert (length_of(window=window, options={"switch_length": length}) is not None) == switches

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (7, "must be an object with switch or switch_length, got 7"),
            ({"swich": False}, "'swich' is not known, expected switch or switch_length"),
            ({"switch": "no"}, "switch must be true or false, got 'no'"),
            ({"switch_length": 0}, "switch_length must be a positive number of tokens, got 0"),
            ({"switch_length": True, "switch": 1}, "2 problems"),
        ],
    )
    def test_wrong_options_are_refused(self, options, message):
        with pytest.raises(LongRopeError, match=message) as caught:
            length_of(options=options)
        assert "switch_length" in caught.value.hint
        assert length_of(PLAIN, options=options) is None  # not our business


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"speculative_config": object()}, "speculative decoding is not supported"),
            ({"kv_transfer_config": object()}, "a KV connector .* is not supported"),
            ({"parallel": {"prefill_context_parallel_size": 2}}, "prefill context parallelism is not supported"),
            ({"parallel": {"decode_context_parallel_size": 2}}, "decode context parallelism is not supported"),
            ({"parallel": {"use_ubatching": True}}, "micro-batches"),
            ({"parallel": {"worker_cls": "mine.Worker"}}, r"--worker-cls mine\.Worker stands where"),
            ({"scheduler_config": SimpleNamespace(scheduler_cls="mine.S")}, r"--scheduler-cls mine\.S stands where"),
            ({"model": {"is_multimodal_model": True}}, "a multi-modal model"),
            ({"model": {"is_encoder_decoder": True}}, "an encoder-decoder model"),
            ({"model": {"is_hybrid": True}}, "state-space layers"),
            ({"model": {"runner_type": "pooling"}}, "a pooling model"),
            ({"model": {"uses_mrope": True}}, "M-RoPE"),
            ({"diffusion_config": object()}, "a diffusion model"),
            ({"model": {"using_transformers_backend": lambda: True}}, "through transformers"),
            ({"window": 1024}, "--max-model-len 1,024 exceeds the model's window of 512"),
            ({"options": {"switch_length": 600}}, "switch length of 600 exceeds the model's window of 512"),
            ({"additional_config": object()}, "must be a dictionary, got object"),
            ({"rope": {"full_attention": LONGROPE, "other": ONE_SIDE}}, "one side in some layers, for two in others"),
        ],
    )
    def test_each_is_named_with_the_way_out(self, changes, message):
        config = engine_config(**changes)
        with pytest.raises(LongRopeError, match=message) as caught:
            refuse_unsupported(config, resolve(config))
        assert '--additional-config \'{"longrope2": {"switch": false}}\'' in caught.value.hint

    def test_all_at_once(self):
        config = engine_config(speculative_config=object(), kv_transfer_config=object())
        with pytest.raises(LongRopeError, match="2 problems"):
            refuse_unsupported(config, resolve(config))

    def test_methods_that_are_not_as_expected(self):
        class Changed:
            def schedule(self, budget):
                pass

        check_methods(Changed(), {"schedule": ("budget",)})
        check_methods(Changed(), {"schedule": ()})
        with pytest.raises(LongRopeError, match="2 problems") as caught:
            check_methods(Changed(), {"schedule": ("request",), "add_request": ("request",)})
        assert "schedule takes ('budget',), expected ('request',)" in caught.value.message
        assert "add_request is missing" in caught.value.message


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_settings_reach_the_other_processes(asynchronous):
    config = engine_config(recorded=100)
    config.scheduler_config.async_scheduling = asynchronous
    settings = resolve(config)
    assert settings.short_rows == 100
    refuse_unsupported(config, settings)
    apply(config, settings)
    assert config.scheduler_config.scheduler_cls == SCHEDULERS[asynchronous]
    assert config.parallel_config.worker_cls == WORKER
    sent = engine_config(additional_config=json.loads(json.dumps(config.additional_config)))
    assert settings_of(sent) == settings
    refuse_unsupported(config, settings)  # vLLM completes some configurations twice
    assert settings_of(engine_config()) is None
    assert RESOLVED in config.additional_config


@pytest.mark.parametrize(
    ("version", "known"), [("0.32.0", True), ("0.30.2+cpu", True), ("0.33.0", False), ("1.0", False)]
)
def test_versions(version, known, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "vllm", SimpleNamespace(__version__=version))
    if known:
        plugin.check_vllm()
        return
    with pytest.raises(LongRopeError, match=rf"vLLM 0\.30, 0\.31, 0\.32, and this is {version}") as caught:
        plugin.check_vllm()
    assert "pip install 'longrope2[vllm]'" in caught.value.hint
