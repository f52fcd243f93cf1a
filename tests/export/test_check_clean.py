"""No false alarms: models that rotate as they say, of every family and rope type, have nothing wrong."""

import json

import pytest
from check_samples import LLAMA3, LONG, LONGROPE, PAIRS, YARN, config, write
from export_samples import ONE_TEMPERATURE, TWO_TEMPERATURES, family_factors, family_folder, tiny_factors

import longrope2
from conftest import FAMILY_OPTIONS, ORIGINAL_LENGTH, TARGET_LENGTH, family_config, family_model
from longrope2 import export_model as export
from longrope2.checking.check import check
from longrope2.export.huggingface import serving_config
from longrope2.models import load
from walk import tiny_config
from walk import tiny_factors as tiny_factors_of

ORIGINAL = {"original_max_position_embeddings": ORIGINAL_LENGTH}
KINDS = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
    "longrope": {"rope_type": "longrope", "factor": 4.0, **ORIGINAL},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
}


def rope_of(family: str, kind: str) -> dict:
    plain = family_config(family)
    parameters = plain.rope_parameters.get("full_attention", plain.rope_parameters)
    head = getattr(plain, "head_dim", None) or plain.hidden_size // plain.num_attention_heads
    count = int(head * parameters.get("partial_rotary_factor", 1.0)) // 2
    lists = {"short_factor": [1.0] * count, "long_factor": [1.0 + i for i in range(count)]}
    return {**KINDS[kind], **(lists if kind == "longrope" else {})}


@pytest.mark.parametrize("family", FAMILY_OPTIONS)
def test_a_live_model_of_each_rope_type(family):
    for kind in KINDS:
        if (family, kind) in {("phi", "proportional"), ("stablelm", "proportional")}:
            continue  # transformers cannot run them: see below
        if family == "phi3" and kind not in ("default", "longrope"):
            continue  # transformers refuses them
        window = TARGET_LENGTH if kind not in ("default", "dynamic", "proportional") else ORIGINAL_LENGTH
        own = ORIGINAL if family == "phi3" and kind == "longrope" else {}
        report = check(family_model(family, rope_of(family, kind), max_position_embeddings=window, **own))
        assert report.wrong == [], kind
        run = {finding.engine.split()[0]: finding for finding in report.findings if finding.mode != "read"}
        assert run["transformers"].verdict == run["live"].verdict == "right", kind
        assert run["transformers"].max_error < 1e-5
        ours = next(finding for finding in report.findings if finding.engine == "longrope2")
        assert ours.verdict == "right", kind


@pytest.mark.parametrize("model_type", ["lfm2", "gemma4_text", "deepseek_v3", "llama4_text", "qwen3_5_text"])
def test_an_export_of_a_type_that_is_in_no_table(model_type, tmp_path):
    plain = tiny_config(model_type)
    written = serving_config(plain.to_dict(), tiny_factors_of(plain), dtype="float32")
    report = check(write(tmp_path / "m", written))
    assert report.wrong == []
    found = {finding.engine.split()[0]: finding.verdict for finding in report.findings}
    assert (found["longrope2"], found["vLLM"]) == ("right", "not checked")


def test_a_model_that_cannot_run_is_reported_not_raised():
    report = check(family_model("phi", rope_of("phi", "proportional")))
    assert [(f.engine, f.verdict) for f in report.wrong] == [("live model", "FAILED")]


# As their makers wrote them, or as their documentation says; the sizes are a toy's.
PUBLIC = {
    "Llama 2": config(rope_scaling=None),
    "longchat": config(rope_scaling={"factor": 8.0, "type": "linear"}),
    "Llama 3.1": config(rope_theta=500000.0, rope_scaling=LLAMA3, transformers_version="4.42.3"),
    "Llama 3.1 saved by transformers 5": config(rope_parameters={**LLAMA3, "rope_theta": 500000.0}),
    "Phi-3.5": config("phi3", rope_theta=10000.0, original_max_position_embeddings=256, rope_scaling=LONGROPE),
    "Phi-4-mini": config(
        "phi3", original_max_position_embeddings=256, partial_rotary_factor=0.75, sliding_window=262144,
        rope_scaling={**LONGROPE, "short_factor": [1.0] * 6, "long_factor": LONG[:6]},
    ),
    "Qwen2.5 with YaRN": config(
        "qwen2", 256, rope_theta=1000000.0, use_sliding_window=False, sliding_window=131072,
        rope_scaling={"factor": 4.0, "original_max_position_embeddings": 256, "type": "yarn"},
    ),
    "Qwen3 with YaRN, room for the answer": config("qwen3", 320, head_dim=16, rope_theta=1e6, rope_scaling=YARN),
    "DeepSeek's mscales": config(
        rope_scaling={**YARN, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
    ),
    "Mistral v0.1": config("mistral", sliding_window=256),
    "Gemma 3": config("gemma3_text", head_dim=16, num_hidden_layers=6, rope_theta=1e6, rope_local_base_freq=10000.0,
                      sliding_window=64, rope_scaling={"factor": 8.0, "rope_type": "linear"}),
    "GPT-OSS": config("gpt_oss", head_dim=16, rope_theta=150000, sliding_window=128, num_local_experts=2,
                      num_experts_per_tok=1, rope_scaling={**YARN, "truncate": False, "beta_fast": 32.0}),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_public_configs_without_weights(name, tmp_path):
    report = check(write(tmp_path / "m", PUBLIC[name]))
    assert report.wrong == []
    assert report.findings[-1].verdict == "not checked"
    assert "no weights" in report.findings[-1].note


@pytest.mark.parametrize("profile", ["dual", "static-long"])
@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3_text"])
def test_our_own_exports(family, profile, tmp_path):
    folder = family_folder(tmp_path / "model", family)
    for name, temperature in {"one": ONE_TEMPERATURE, "two": TWO_TEMPERATURES}.items():
        factors = family_factors(load(folder, device="cpu").model, **temperature)
        report = check(export(str(folder), tmp_path / name, factors=factors, profile=profile))
        assert report.wrong == []
        current = [f for f in report.findings if f.engine.startswith(("transformers 5", "vLLM", "longrope2", "live"))]
        # transformers has no second attention factor to give; export said so.
        limits = [f for f in current if f.verdict != "right"]
        assert [f.verdict for f in limits] == (["known limit"] if (name, profile) == ("two", "dual") else [])


def test_our_own_gguf_and_a_live_model_of_ours(tmp_path):
    path = export("tiny", tmp_path / "e.gguf", factors=tiny_factors(**ONE_TEMPERATURE), format="gguf")
    report = check(path)
    assert report.wrong == []
    assert {finding.verdict for finding in report.findings} == {"right"}
    report = check(longrope2.load("tiny", factors=tiny_factors(**TWO_TEMPERATURES)))
    assert report.wrong == []
    assert "longrope" in report.stated


def test_corrected_keys_leave_nothing_to_say(tmp_path):
    """What is printed for a config that only some engines read: all of them do, then."""
    before = PUBLIC["Llama 3.1 saved by transformers 5"]
    report = check(write(tmp_path / "m", before))
    assert {f.verdict for f in report.findings if f.engine.startswith("transformers 4")} == {"known limit"}
    assert json.loads(json.dumps(report.corrected)) == report.corrected
    after = check(write(tmp_path / "m", {**before, **report.corrected}))
    assert {f.verdict for f in after.findings} <= {"right", "not checked"}
    assert after.corrected is None


def test_pairs_of_the_samples():
    assert len(LONG) == PAIRS
