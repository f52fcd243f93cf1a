"""vLLM with the plugin: every token's log-probabilities against our own uncached forward. On a CPU, in this process."""

import json
import os
import random
import shutil

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch
import vllm
from safetensors.torch import save_file
from serving_samples import (
    BLOCK,
    EXACT,
    OFF,
    ORIGINAL,
    VOCABULARY,
    WINDOW,
    Ask,
    Oracle,
    ask,
    ask_one_by_one,
    counters,
    engine,
    export_family,
    requests_around,
    tokens_of,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest

from longrope2 import export_model
from longrope2.errors import LongRopeError
from longrope2.export.engines import VLLM
from longrope2.factors import RescaleFactors
from longrope2.generation.saved import FACTORS_FILE
from longrope2.serving.settings import RESOLVED, WORKER

pytestmark = pytest.mark.vllm
FEW_BLOCKS = {"num_gpu_blocks_override": 20}
"""One request of the full window takes 16."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return export_family(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def oracle(folder):
    return Oracle(folder)


@pytest.fixture(scope="module")
def running(folder):
    """An engine for tests of single requests."""
    with engine(folder, async_scheduling=True) as started:
        yield started


def scheduler_of(running):
    return running.llm_engine.engine_core.engine_core.scheduler


class TestMixedBatches:
    """Requests below the switch, at it, across it and above it, twice, so that the second time finds cached blocks."""

    @pytest.mark.parametrize("blocks", [{}, FEW_BLOCKS])
    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_every_token(self, folder, oracle, asynchronous, blocks):
        asks = requests_around(ORIGINAL)
        with engine(folder, async_scheduling=asynchronous, **blocks) as started:
            outputs = ask(started, asks) + ask(started, asks)
            counted = counters(started)
        assert oracle.is_exact(outputs)
        crossing = sum(len(one.prompt) <= ORIGINAL and len(one.prompt) + one.new_tokens > ORIGINAL + 1 for one in asks)
        assert counted["vllm:num_preemptions"] >= 2 * crossing == 14
        assert blocks or counted["vllm:num_preemptions"] == 14
        assert counted["vllm:prefix_cache_hits"] > 0

    def test_control_plain_vllm_is_wrong_below_the_switch(self, folder, oracle):
        with engine(folder, **OFF) as started:
            worst = oracle.worst(ask(started, requests_around(ORIGINAL)))
        assert worst["short"] > 1
        assert worst["long"] < EXACT

    def test_control_without_the_salt_long_requests_read_short_blocks(self, folder, oracle):
        with engine(folder) as started:
            scheduler_of(started)._long_salt = ""
            worst = oracle.worst(ask(started, requests_around(ORIGINAL)))
        assert worst["short"] < EXACT
        assert worst["long"] > 1

    def test_compiled(self, folder, oracle):
        with engine(folder, enforce_eager=False) as started:
            assert oracle.is_exact(ask(started, requests_around(ORIGINAL)))

    @pytest.mark.parametrize("length", [48, 100])
    def test_another_switch_length(self, folder, length, tmp_path):
        """From the command line, or as `calibrate` records it in an export; below the original window or above."""
        recorded = shutil.copytree(folder, tmp_path / "recorded")
        config = json.loads((recorded / "config.json").read_text())
        (recorded / "config.json").write_text(json.dumps({**config, "longrope2": {"switch_length": length}}))
        given = {"additional_config": {"longrope2": {"switch_length": length}}}
        for place, options in ((folder, given), (recorded, {})):
            with engine(place, **options) as started:
                assert Oracle(place, length).is_exact(ask(started, requests_around(length)))

    def test_a_window_that_is_short_for_all(self, folder, oracle):
        """Where vLLM itself is right, nothing is changed."""
        with engine(folder, max_model_len=ORIGINAL) as started:
            assert type(scheduler_of(started)).__module__.startswith("vllm.")
            assert oracle.is_exact(ask(started, [Ask(prompt=list(range(3, 30)), new_tokens=20)]))


@pytest.mark.parametrize("family", sorted(set(VLLM.families) - {"llama"}))
def test_families(family, tmp_path):
    place = export_family(tmp_path, family)
    with engine(place) as started:
        worst = Oracle(place).worst(ask(started, requests_around(ORIGINAL)))
    # vLLM's attention on a CPU approximates the soft cap of Gemma 2, with one side as with two.
    assert max(worst.values()) < (0.2 if family == "gemma2" else EXACT)


def write_adapter(place, model):
    """A random LoRA adapter, which is also added to the model's weights."""
    generator, rank, tensors = torch.Generator().manual_seed(0), 8, {}
    for name, layer in model.named_modules():
        if name.endswith(("q_proj", "v_proj")):
            down = 0.1 * torch.randn(rank, layer.in_features, generator=generator)
            up = 0.1 * torch.randn(layer.out_features, rank, generator=generator)
            prefix = f"base_model.model.{name}"
            tensors |= {f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up}
            layer.weight.data += up @ down
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj", "v_proj"],
              "bias": "none", "task_type": "CAUSAL_LM"}  # fmt: skip
    place.mkdir()
    save_file(tensors, place / "adapter_model.safetensors")
    (place / "adapter_config.json").write_text(json.dumps(config))


def test_lora(folder, oracle, tmp_path):
    """Not both kinds in one batch, which vLLM 0.32 gets wrong on a CPU, with the plugin and without."""
    tuned = Oracle(folder)
    write_adapter(tmp_path / "adapter", tuned.model)
    adapter = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    asks = requests_around(ORIGINAL)
    with engine(folder, enable_lora=True, max_lora_rank=8) as started:
        for expected, options in ((tuned, {"lora_request": adapter}), (oracle, {}), (tuned, {"lora_request": adapter})):
            assert expected.is_exact(ask(started, asks, **options))


def random_requests(draw, count):
    """With what a request may ask for besides."""
    shared = [tokens_of(draw, WINDOW) for _ in range(3)]
    for _ in range(count):
        around = [ORIGINAL - 1, ORIGINAL, ORIGINAL + 1]
        length = draw.choice([3, *around, draw.randrange(2, 2 * ORIGINAL), draw.randrange(2, WINDOW - 50)])
        begin = draw.choice([0, length // 2, length])
        prompt = draw.choice(shared)[:begin] + tokens_of(draw, length - begin)
        room = ORIGINAL - length
        new = draw.choice([1, 10, 40, *(max(1, room + more) for more in (0, 1, 2, 10))])
        options = draw.choice([{}, {}, {"n": 2}, {"prompt_logprobs": 2}, {"stop_token_ids": tokens_of(draw, 5)}])
        yield Ask(prompt=prompt, new_tokens=min(new, WINDOW - length), options=options)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_stress(folder, oracle, asynchronous):
    """300 random requests at random times, a cache that is too small for them, aborts."""
    draw = random.Random(7)
    asks = list(random_requests(draw, 300))
    aborted = set()

    def abort_some(running_engine):
        if draw.random() < 0.02:
            aborted.add(str(draw.randrange(len(asks))))
            running_engine.abort_request(sorted(aborted))

    with engine(folder, async_scheduling=asynchronous, **FEW_BLOCKS) as started:
        found = ask_one_by_one(started, asks, draw, abort_some)
        assert counters(started)["vllm:num_preemptions"] > 100
        assert scheduler_of(started).kv_cache_manager.usage == 0
        assert len(scheduler_of(started)._long) <= 8  # until the next step
    assert found.keys() | aborted == {str(number) for number in range(len(asks))}
    assert len(found) > 250
    outputs = list(found.values())
    assert oracle.is_exact(outputs)
    for output in outputs:
        one = asks[int(output.request_id)]
        assert len(output.outputs) == one.options.get("n", 1)
        if "prompt_logprobs" in one.options:
            assert len(output.prompt_logprobs) == len(one.prompt)
            assert oracle.prompt_error(output) < EXACT
        for answer in output.outputs:
            stopped = answer.token_ids[-1] in one.options.get("stop_token_ids", ())
            assert stopped or len(answer.token_ids) == one.new_tokens


def test_stress_control_plain_vllm(folder, oracle):
    """The same requests, without the plugin: every short answer is wrong."""
    draw = random.Random(7)
    with engine(folder, **OFF, **FEW_BLOCKS) as started:
        found = ask_one_by_one(started, list(random_requests(draw, 60)), draw)
    errors = [error for output in found.values() for error in oracle.errors(output)]
    assert max(error for long, error in errors if long) < EXACT
    wrong = [error > 100 * EXACT for long, error in errors if not long]
    assert sum(wrong) > 0.9 * len(wrong) > 100


class TestSingleRequests:
    @pytest.mark.parametrize("length", [ORIGINAL - 5, ORIGINAL, ORIGINAL + 1, 2 * ORIGINAL])
    def test_log_probabilities_of_the_prompt(self, running, oracle, length):
        """They are those of the prompt's own side, and not computed again with it."""
        prompt = tokens_of(random.Random(length), length)
        (output,) = ask(running, [Ask(prompt=prompt, new_tokens=20, options={"prompt_logprobs": VOCABULARY})])
        assert len(output.prompt_logprobs) == length
        assert oracle.prompt_error(output) < EXACT
        assert oracle.is_exact([output])

    def test_several_answers_to_one_prompt(self, running, oracle):
        prompt = tokens_of(random.Random(1), ORIGINAL - 4)
        (output,) = ask(running, [Ask(prompt=prompt, new_tokens=12, options={"n": 3})])
        assert len({tuple(answer.token_ids) for answer in output.outputs}) == 3
        assert oracle.is_exact([output])

    @pytest.mark.parametrize("after", [ORIGINAL, ORIGINAL + 1, ORIGINAL + 2])
    def test_a_stop_token_at_the_switch(self, running, oracle, after):
        """As the last token of the short side, the one that makes the request too long for it, and the next one."""
        for seed in range(50):
            prompt = tokens_of(random.Random(seed), ORIGINAL - 4)
            greedy = {"temperature": 0.0}
            (free,) = ask(running, [Ask(prompt=prompt, new_tokens=10, options=greedy)])
            answer = list(free.outputs[0].token_ids)
            place = after - len(prompt) - 1
            if answer.index(answer[place]) == place:
                break
        stop = {**greedy, "stop_token_ids": [answer[place]]}
        (output,) = ask(running, [Ask(prompt=prompt, new_tokens=10, options=stop)])
        assert list(output.outputs[0].token_ids) == answer[: place + 1]
        assert output.outputs[0].finish_reason == "stop"
        assert oracle.is_exact([free, output])

    @pytest.mark.parametrize("steps", [4, 5, 6, 7])
    def test_an_abort_at_the_switch(self, running, oracle, steps):
        prompt = tokens_of(random.Random(2), ORIGINAL - 4)
        counted = []

        def abort(running_engine):
            counted.append(1)
            if len(counted) == steps:
                running_engine.abort_request(["0"])

        found = ask_one_by_one(running, [Ask(prompt=prompt, new_tokens=30)], random.Random(0), abort)
        assert found == {}
        assert scheduler_of(running).kv_cache_manager.usage == 0
        assert oracle.is_exact(ask(running, [Ask(prompt=prompt, new_tokens=10)]))

    def test_several_turns(self, running, oracle):
        """A prefix that was cached on the short side is not found on the long side; each side finds its own."""
        draw = random.Random(3)
        scheduler_of(running).reset_prefix_cache()
        prompt, cached = tokens_of(draw, 34), []
        for _ in range(5):
            (output,) = ask(running, [Ask(prompt=prompt, new_tokens=2)])
            assert oracle.is_exact([output])
            cached.append(output.num_cached_tokens)
            prompt = prompt + list(output.outputs[0].token_ids) + tokens_of(draw, 20)
        assert cached == [0, BLOCK, 0, 2 * BLOCK, 3 * BLOCK]

    def test_the_cache_may_be_cleared_while_requests_run(self, running, oracle):
        draw = random.Random(4)

        def clear(running_engine):
            if draw.random() < 0.1:
                scheduler_of(running).reset_prefix_cache(reset_running_requests=True)

        found = ask_one_by_one(running, requests_around(ORIGINAL, seed=5), draw, clear)
        assert oracle.is_exact(list(found.values()))

    def test_prompts_in_pieces_are_refused(self, running):
        processor = running.llm_engine.input_processor
        parameters = vllm.SamplingParams(max_tokens=1)
        with pytest.raises(ValueError, match="a prompt sent in pieces cannot switch RoPE"):
            processor.process_inputs("a", {"prompt_token_ids": [5]}, parameters, ("generate",), resumable=True)


class TestStart:
    def config_of(self, place, **options):
        options = {"max_model_len": WINDOW, "skip_tokenizer_init": True, "enforce_eager": True, **options}
        return EngineArgs(model=str(place), **options).create_engine_config()

    def test_what_is_changed(self, folder):
        config = self.config_of(folder)
        assert config.parallel_config.worker_cls == WORKER
        assert config.additional_config[RESOLVED]["switch_length"] == ORIGINAL
        plain = self.config_of(folder, **OFF)
        assert plain.compute_hash() != config.compute_hash()

    def test_other_models_are_left_alone(self, folder, tmp_path):
        """A model without longrope, and one with the long factors in every sequence."""
        static = tmp_path / "static"
        factors = RescaleFactors.load(folder / FACTORS_FILE)
        export_model(str(folder), static, factors=factors, profile="static-long", extend_again=True)
        plain = shutil.copytree(folder, tmp_path / "plain")
        config = json.loads((plain / "config.json").read_text())
        for key in ("rope_scaling", "original_max_position_embeddings"):
            del config[key]
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
        (plain / "config.json").write_text(json.dumps(config))
        for place in (static, plain):
            config = self.config_of(place)
            assert config.additional_config == {}
            assert config.scheduler_config.scheduler_cls is None
            assert config.parallel_config.worker_cls.startswith("vllm.")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
             "speculative decoding is not supported"),
            ({"kv_offloading_size": 1.0}, "a KV connector"),
            ({"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, "--scheduler-cls"),
            ({"worker_cls": "mine.Worker"}, "--worker-cls"),
            ({"model_impl": "transformers"}, "through transformers"),
        ],
    )  # fmt: skip
    def test_what_is_refused(self, folder, options, message):
        with pytest.raises(LongRopeError, match=message) as caught:
            self.config_of(folder, **options)
        assert '{"longrope2": {"switch": false}}' in caught.value.hint

    def test_a_family_that_vllm_runs_through_transformers(self, tmp_path):
        with pytest.raises(LongRopeError, match="export it with static-long"):
            self.config_of(export_family(tmp_path, "olmo2"))

    def test_another_version(self, folder, monkeypatch):
        monkeypatch.setattr(vllm, "__version__", "0.99.1")
        with pytest.raises(LongRopeError, match=r"this is 0\.99\.1"):
            self.config_of(folder)
        self.config_of(folder, **OFF)
