"""The commands that use vLLM, with the plugin in the same environment: verify and evaluate."""

import json
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

from longrope2 import export_model
from longrope2.evaluation.evaluate import JOURNAL
from longrope2.factors import RescaleFactors
from longrope2.generation.saved import store_switch_length
from longrope2.methods import rescale
from longrope2.models import describe

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The embedded model with another temperature on each side."""
    factors = rescale("yarn-rcd", describe("tiny").rope, 1024).to_json()
    factors |= {"short_attention_factor": 1.0, "long_attention_factor": 1.1}
    place = tmp_path_factory.mktemp("export") / "dual"
    export_model("tiny", place, factors=RescaleFactors.from_json(factors), profile="dual", dtype="float32")
    return place


def run(*arguments):
    """In a process of its own, since vLLM 0.30 wants a stdout with a file number."""
    result = subprocess.run([sys.executable, "-m", "longrope2", *arguments], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.mark.parametrize("length", [None, 200])
def test_verify(exported, length):
    if length is not None:
        store_switch_length(exported, length)
    found = json.loads(run("verify", exported, "--engine", f"vllm={sys.executable}", "--json"))
    store_switch_length(exported, 256)
    by_mode = {finding["mode"]: finding for finding in found if finding["engine"].startswith("vllm")}
    assert {mode: finding["verdict"] for mode, finding in by_mode.items()} == {
        "short": "right", "crossing": "right", "long": "right",
    }  # fmt: skip
    assert all("with longrope2" in finding["engine"] for finding in by_mode.values())
    assert max(finding["max_error"] for finding in by_mode.values()) < 1e-3


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "yarn", "attention_factor": 0.9},
        {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ],
    ids=["yarn", "llama3"],
)
def test_verify_of_what_others_extended(scaling, exported, tmp_path):
    """vLLM rotates these by itself, with one RoPE at every length."""
    folder = shutil.copytree(exported, tmp_path / "other", ignore=shutil.ignore_patterns("factors.json"))
    config = json.loads((folder / "config.json").read_text())
    parameters = {"rope_theta": config["rope_theta"], "factor": 4.0, "original_max_position_embeddings": 256, **scaling}
    config |= {"rope_parameters": parameters, "rope_scaling": None}
    (folder / "config.json").write_text(json.dumps(config))
    found = json.loads(run("verify", folder, "--engine", f"vllm={sys.executable}", "--json"))
    verdicts = {finding["mode"]: finding["verdict"] for finding in found if finding["engine"].startswith("vllm")}
    assert verdicts == dict.fromkeys(("short", "short, long factors", "long"), "right"), found


def test_evaluate(exported, tmp_path, monkeypatch):
    """The answers of our own forward, but for rounding, on both sides."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    options = ["--suite", "niah", "--lengths", "128,512", "--samples", "2"]
    for backend in ("torch", "vllm"):
        run("evaluate", exported, *options, "--backend", backend, "-o", tmp_path / backend)
    torch, vllm = (json.loads((tmp_path / backend / "results.json").read_text()) for backend in ("torch", "vllm"))
    answers = [
        {line["sample"]: line["answer"] for line in lines if line["type"] == "answer"}
        for lines in (map(json.loads, (tmp_path / backend / JOURNAL).open()) for backend in ("torch", "vllm"))
    ]
    # vLLM takes bfloat16 for models stored in float32.
    same = [answer == answers[1][sample] for sample, answer in answers[0].items()]
    assert sum(same) >= 42
    assert len(same) == 2 * 11 * 2
    assert vllm["switch_length"] == torch["switch_length"] == 256
    assert vllm["notes"] == torch["notes"]
    assert vllm["scores"] == torch["scores"]
