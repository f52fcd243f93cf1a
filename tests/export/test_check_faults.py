"""Every classic fault is found, with its numbers and the corrected config; public issues are cases."""

import json
import logging
import re
from functools import partial

import numpy as np
import pytest
import torch
from check_samples import LLAMA3, LONG, LONGROPE, PAIRS, YARN, config, write, write_gguf_like
from click.testing import CliRunner
from export_samples import tiny_factors

from conftest import family_model
from longrope2 import check, export_model
from longrope2.cli import cli
from longrope2.errors import LongRopeError, ModelError

MSCALES = {"short_mscale": 1.0, "long_mscale": 1.0}
# Name: the config, which finding is wrong, words of its evidence.
FAULTS = {
    # unsloth 7028: a section without a base takes the place of one that has it
    "the base is lost": (
        config(rope_parameters={**LLAMA3, "rope_theta": 500000.0}, rope_scaling={"type": "linear", "factor": 2.0}),
        "transformers 5", "frequency 7 is 0.0001581 in place of 5.157e-06",
    ),
    "two bases": (
        config(rope_theta=10000.0, rope_parameters={**YARN, "rope_theta": 500000.0}),
        "config.json, rope_theta", "10,000 in the top level, 500,000 in rope_parameters",
    ),
    "two sections that disagree": (
        config(rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, rope_scaling=YARN),
        "config.json, sections", "rope_scaling says 'yarn' and rope_parameters 'default'",
    ),
    "the other generation's keys": (
        config(rope_theta=10000.0, rope_parameters={**YARN, "rope_theta": 10000.0}, transformers_version="4.57.1"),
        "config.json, sections", "transformers 4.57.1, which knows only rope_scaling",
    ),
    "two types": (
        config(rope_scaling={**YARN, "type": "linear"}), "config.json, rope_type", "type 'linear' and rope_type 'yarn'",
    ),
    "an unknown type": (config(rope_scaling={"rope_type": "ntk", "factor": 2.0}), "config.json, rope_type", "'ntk'"),
    "a number as text": (
        config(rope_scaling={**YARN, "factor": "4"}), "config.json, factor", "must be a number above 0, got '4'",
    ),
    "a factor below 1": (
        config(rope_scaling={**YARN, "factor": 0.25}), "config.json, factor", "must be at least 1, got 0.25",
    ),
    # NVIDIA-NeMo/Automodel 2652, ROCm/aiter 4742
    "YaRN without its original window": (
        config(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "config.json, original_max",
        "max_position_embeddings = 1,024 for it, where the factor of 4 makes it 256",
    ),
    "llama3 without it": (
        config(window=131072, rope_scaling={k: v for k, v in LLAMA3.items() if "original" not in k}),
        "config.json, original_max", "max_position_embeddings = 131,072 for it, where Meta's models have 8,192",
    ),
    # transformers takes the whole window for it, and never switches
    "longrope without it": (
        config(rope_scaling={**LONGROPE, "factor": 4.0}), "config.json, original_max", "makes it 256",
    ),
    "two original windows": (
        config(original_max_position_embeddings=128, rope_scaling=YARN),
        "config.json, original_max", "128 in the top level, 256 in rope_scaling",
    ),
    "lists of a wrong length": (
        config(original_max_position_embeddings=256, rope_scaling={**LONGROPE, "long_factor": LONG[:-1]}),
        "config.json, long_factor", "has 7 numbers, and the model rotates 8 pairs (a head of 16)",
    ),
    "lists with text": (
        config(original_max_position_embeddings=256, rope_scaling={**LONGROPE, "short_factor": ["1"] * PAIRS}),
        "config.json, short_factor", "not numbers above 0",
    ),
    "a window scaled twice": (
        config(window=4096, rope_scaling=YARN), "config.json, max_position",
        "4,096 is beyond 4 times the original window of 256, which is 1,024, as if the window had been scaled twice",
    ),
    "a window below the original one": (
        config(window=128, rope_scaling=YARN), "config.json, max_position", "128 is below the original window of 256",
    ),
    "llama3 without an extension": (
        config(window=64, rope_scaling=LLAMA3), "config.json, max_position", "64 is not below max_position_embeddings",
    ),
    "a factor that is missing": (
        config(rope_scaling={"rope_type": "linear"}), "config.json, keys", "linear needs factor",
    ),
    # LongRoPE2 at temperature 1: transformers reads the key, vLLM another one
    "an attention factor that vLLM does not read": (
        config(original_max_position_embeddings=256, rope_scaling={**LONGROPE, "attention_factor": 1.0}),
        "vLLM", "the attention factor of long sequences is 1.1180 in place of 1.0000",
    ),
    "mscales that transformers does not read": (
        config(original_max_position_embeddings=256, rope_scaling={**LONGROPE, **MSCALES}),
        "transformers 5", "the attention factor of long sequences is 1.1180 in place of 1.0000",
    ),
    # Mistral 7B v0.1 with YaRN
    "a sliding window that hides everything": (
        config("mistral", sliding_window=256, rope_scaling=YARN), "config.json, sliding_window",
        "every layer attends to the last 256 tokens only",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_fault(name, tmp_path):
    content, where, evidence = FAULTS[name]
    logged = []
    handler = logging.Handler()
    handler.emit = logged.append
    logging.getLogger("transformers").addHandler(handler)
    try:
        report = check(write(tmp_path / "m", content))
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert logged == []  # the findings say it
    wrong = {f"{f.engine}, {f.mode}": f.note for f in report.wrong}
    assert any(key.startswith(where) and evidence in note for key, note in wrong.items()), wrong


@pytest.mark.parametrize(
    "name",
    ["the base is lost", "two sections that disagree", "YaRN without its original window", "longrope without it",
     "llama3 without it", "a window scaled twice", "an attention factor that vLLM does not read",
     "mscales that transformers does not read", "the other generation's keys",
     "a sliding window that hides everything"],
)  # fmt: skip
def test_the_corrected_keys_are_right(name, tmp_path):
    content, _, _ = FAULTS[name]
    corrected = check(write(tmp_path / "m", content)).corrected
    report = check(write(tmp_path / "m", {**content, **corrected}))
    assert report.wrong == []
    assert report.corrected is None or "known limit" in {f.verdict for f in report.findings}


@pytest.mark.parametrize("name", ["a factor below 1", "a number as text", "lists of a wrong length", "lists with text"])
def test_where_nothing_tells_what_was_meant_no_keys_are_offered(name, tmp_path):
    assert check(write(tmp_path / "m", FAULTS[name][0])).corrected is None


def test_reasons_of_transformers_are_whole(tmp_path):
    content, _, _ = FAULTS["lists of a wrong length"]
    notes = [f.note for f in check(write(tmp_path / "m", {**content, "model_type": "phi3"})).wrong]
    assert any("must have length 8, got 7" in note for note in notes), notes
    notes = [f.note for f in check(write(tmp_path / "m", config(rope_scaling="yarn"))).wrong]
    assert "it refuses this config: rope_parameters must be an object, got 'yarn'" in notes


# Public issues of engines and versions: nothing is wrong with the config, and each row says who reads it otherwise.
LIMITS = {
    # vllm 48621 and 48623, sglang 22711: Ministral 3
    "mscale": (
        config(window=4096, rope_scaling={**YARN, "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0}),
        {"vLLM 0.12 to 0.29": "is 1.2773 in place of 1.0000", "vLLM 0.30": "", "llama.cpp": "1.2773"},
    ),
    # vllm 46280 and 48351, mlx-lm 1507, TensorRT-LLM 16379: Laguna
    "attention_factor": (
        config(window=16384, rope_scaling={**YARN, "factor": 64.0, "attention_factor": 1.0}),
        {"vLLM 0.12 to 0.29": "1.4159 in place of 1.0000", "vLLM 0.30": "", "mlx-lm": "1.4159", "llama.cpp": "1.4159"},
    ),
    # DeepSpeed 8345, lmdeploy 4303, mini-sglang 13, mlx-lm 953: the base stands in rope_parameters alone
    "rope_theta": (
        config(rope_parameters={"rope_type": "default", "rope_theta": 500000.0}),
        {"transformers 4": "base 10,000 in place of 500,000", "mlx-lm": "base 10,000", "vLLM": "", "llama.cpp": ""},
    ),
    # Megatron-LM 1418, sglang 2943: Qwen's YaRN keeps the window as it was
    "factor": (
        config("qwen2", 256, rope_theta=1e6, rope_scaling=YARN),
        {"transformers 4.51 to 4.55": "the attention factor is 1.0000 in place of 1.1386", "transformers 4.56": ""},
    ),
    # llama.cpp 24820 is of Phi; of others its converter drops both lists
    "longrope": (
        config(rope_theta=1e4, original_max_position_embeddings=256, rope_scaling=LONGROPE),
        {"llama.cpp": "its converter drops the factors", "transformers 4.43 to 4.50": "frequency 7 of long sequences"},
    ),
    "longrope without a top": (
        config(rope_theta=1e4, rope_scaling={**LONGROPE, "factor": 4.0, "original_max_position_embeddings": 256}),
        {"transformers 4.51 to 4.57": "the attention factor"},
    ),
    "linear, with the window before": (
        config(rope_scaling={"type": "linear", "factor": 4.0, "original_max_position_embeddings": 256}),
        {"vLLM": "it multiplies the window once more: start it with --max-model-len 1024"},
    ),
    "llama3 of another window": (
        config(rope_theta=500000.0, rope_scaling=LLAMA3), {"llama.cpp": "frequency", "mlx-lm": ""},
    ),
    # mlx-lm demands a base of some families, and has a default for others
    "rope_theta of Qwen 3": (
        config("qwen3", head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
        {"mlx-lm": "it lacks 'rope_theta'", "llama.cpp": ""},
    ),
    "dynamic": (config(rope_scaling={"type": "dynamic", "factor": 4.0}), {"llama.cpp": "does not know dynamic"}),
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_what_other_engines_and_versions_do(name, tmp_path):
    content, expected = LIMITS[name]
    report = check(write(tmp_path / "m", content))
    assert report.wrong == []
    for engine, evidence in expected.items():
        (finding,) = (f for f in report.findings if f.engine.startswith(engine) and f.mode == "read")
        assert evidence in finding.note
        assert finding.verdict == ("right" if not evidence or engine == "vLLM" else "known limit")


@pytest.mark.parametrize(
    ("family", "rope", "mlx"),
    [
        # Gemma 3 4B states no base, and both engines have the right one for it
        ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "right"),
        # Ministral 3 and DeepSeek: llama.cpp reads their mscales, as it does in no other family
        ("ministral3", {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}, "not checked"),
    ],
)
def test_nothing_is_said_of_families_that_llama_cpp_reads_in_its_own_way(family, rope, mlx, tmp_path):
    report = check(write(tmp_path / "m", config(family, head_dim=16, **rope)))
    found = {finding.engine.split()[0]: finding for finding in report.findings}
    assert (found["mlx-lm"].verdict, found["llama.cpp"].verdict) == (mlx, "not checked")
    assert "a converter of their own" in found["llama.cpp"].note


def test_a_trainer_that_changes_the_config_of_a_live_model():
    """Soup 793: `Long-context enabled`, and the frequencies stay as they were."""
    model = family_model("llama", max_position_embeddings=1024)
    assert check(model).wrong == []
    model.config.rope_parameters = {**YARN, "rope_theta": 10000.0}
    (wrong,) = check(model).wrong
    assert wrong.engine.startswith("transformers 5")
    assert "in place of" in wrong.note
    assert 0.7 < wrong.max_error < 0.76  # the last dimensions should turn four times more slowly

    with pytest.warns(FutureWarning):
        model.config.rope_scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    wrong = {finding.mode: finding.note for finding in check(model).wrong}
    assert "rope_theta is null in rope_parameters" in wrong["rope_theta"]
    assert "run" in wrong


def test_a_model_that_rotates_otherwise_than_its_module_says():
    """A patch that nobody calls, and layers that rotate alone."""
    model = family_model("llama")
    attention = model.model.layers[1].self_attn
    forward = attention.forward
    angles = torch.full((16,), 0.3)

    def alone(hidden_states, position_embeddings, position_ids=None, **options):
        positions = position_ids[..., None].float() * angles
        return forward(hidden_states, position_embeddings=(positions.cos(), positions.sin()), **options)

    attention.forward = alone
    (wrong,) = check(model).wrong
    assert wrong.engine == "live model"
    assert "some layers rotate alone" in wrong.note

    model = family_model("llama").train()
    assert check(model).wrong == []
    assert model.training
    for layer in model.model.layers:
        unturned = (torch.ones(1, 1, 16), torch.zeros(1, 1, 16))
        ignoring = partial(layer.self_attn.forward, position_embeddings=unturned)
        layer.self_attn.forward = lambda *a, ignoring=ignoring, position_embeddings, **kw: ignoring(*a, **kw)
    (wrong,) = check(model).wrong
    assert "its rotary module is never used" in wrong.note


def test_a_model_whose_frequencies_were_rounded():
    """`model.to(torch.bfloat16)` takes the rotary buffer with it; from_pretrained(dtype=) does not."""
    (wrong,) = check(family_model("llama").to(torch.bfloat16)).wrong
    assert 1e-3 < wrong.max_error < 2**-8
    assert "frequency 3 is 0.03174 in place of 0.03162" in wrong.note
    assert "rounded to bfloat16: load the model with dtype=" in wrong.note


def test_a_gguf_file_that_is_scaled_twice(tmp_path):
    source = export_model("tiny", tmp_path / "e.gguf", factors=tiny_factors(), format="gguf")
    scaling = {"type": "longrope", "original_context_length": 256, "attn_factor": 1.0}
    lists = {f"rope_factors_{side}.weight": np.linspace(1, 4, 32, dtype=np.float32) for side in ("long", "short")}
    assert check(write_gguf_like(source, tmp_path / "once.gguf", scaling, lists, window=1024)).wrong == []
    twice = write_gguf_like(source, tmp_path / "twice.gguf", {**scaling, "factor": 4.0}, lists, window=1024)
    (wrong,) = check(twice).wrong
    assert "rope.scaling.factor = 4" in wrong.note
    assert "scaled twice" in wrong.note


class TestCommand:
    def run(self, *arguments):
        return CliRunner().invoke(cli, ["check", *map(str, arguments)])

    def test_exit_codes_and_json(self, tmp_path):
        clean = self.run("tiny", "--json")
        assert clean.exit_code == 0
        content = json.loads(clean.stdout)
        assert content["corrected"] is None
        assert {finding["verdict"] for finding in content["findings"]} == {"right"}
        spoilt = self.run(write(tmp_path / "m", FAULTS["the base is lost"][0]))
        assert spoilt.exit_code == 1
        shown = re.search(r"^\{.*^\}", spoilt.stdout, flags=re.M | re.S)
        assert json.loads(shown[0])["rope_parameters"]["rope_theta"] == 500000.0

    def test_without_weights_or_with_config_only(self, tmp_path):
        only = self.run("tiny", "--config-only")
        assert only.exit_code == 0
        assert "skipped (--config-only)" in only.stdout

    @pytest.mark.parametrize(
        "content", ["{}", "[]", '{"model_type": 3}', '{"model_type": "llama", "hidden_size": "x"}']
    )
    def test_bad_input_is_refused(self, tmp_path, content):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(LongRopeError):
            check(tmp_path)
        with pytest.raises(ModelError, match="no such folder"):
            check(tmp_path / "nowhere")
        with pytest.raises(ModelError, match="not a transformers model"):
            check(torch.nn.Linear(1, 1))

    def test_a_family_that_nobody_knows(self, tmp_path):
        report = check(write(tmp_path / "m", config("novel", rope_theta=500000.0, rope_scaling=LLAMA3)))
        assert report.wrong == []
        verdicts = {finding.engine.split()[0]: finding.verdict for finding in report.findings}
        assert verdicts["transformers"] in ("right", "not checked")
        assert verdicts["longrope2"] == verdicts["live"] == "not checked"
