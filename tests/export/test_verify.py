"""`verify`: engines that run an export rightly pass, every fault is seen, and the exit code says so."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from export_samples import (
    EXTENDED,
    ONE_TEMPERATURE,
    TWO_TEMPERATURES,
    WINDOW,
    edit_config,
    family_factors,
    family_folder,
    tiny_factors,
)

import longrope2
from longrope2 import export_model as export
from longrope2.cli import cli, main
from longrope2.errors import LongRopeError
from longrope2.export import verify as verifying
from longrope2.export.config import VerifyConfig, profiled
from longrope2.export.engines import (
    ENGINES,
    LLAMA_CPP,
    MLX,
    TRANSFORMERS,
    VLLM,
    forced_temperature,
    guidance,
    verifiable,
)
from longrope2.export.probes import probe
from longrope2.export.reference import Answer, Reference
from longrope2.export.verify import verify
from longrope2.generation.saved import store_switch_length
from longrope2.models import load

STUCK_WHEN_DELETED = """
import time
from unittest.mock import MagicMock as CommonParams
__version__, ggml_type, llama_flash_attn_type = "0", CommonParams(), CommonParams()

class Server:
    def __init__(self, options): pass
    def __del__(self): time.sleep(60)
    def handle_completions(self, request):
        top = [{"id": 7, "logprob": -0.5}]
        return {"choices": [{"logprobs": {"content": [{"id": 7, "top_logprobs": top}]}}]}
"""


@pytest.fixture
def in_process(monkeypatch):
    """Run probes here: starting Python and importing transformers once more takes seconds."""
    monkeypatch.setattr(verifying, "_ask", lambda engine, _, job, __: engine.probe(job))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A random model, and its exports in each profile; do not change these."""
    place = tmp_path_factory.mktemp("exports")
    family_folder(place / "model", "llama")
    for profile in ("dual", "static-long"):
        export(str(place / "model"), place / profile, factors=factors_of(place), profile=profile)
    return place


def factors_of(place, **changes):
    return family_factors(load(place / "model", device="cpu").model, **changes)


@pytest.fixture
def dual(folders, tmp_path):
    """A dual export to spoil."""
    return shutil.copytree(folders / "dual", tmp_path / "e")


def findings(path, capsys, *engines):
    capsys.readouterr()
    result = verify(path, VerifyConfig(engines=engines or ("transformers",)))
    assert capsys.readouterr().out == ""
    found = {(f.engine.split()[0], f.mode): f for f in result.findings}
    assert (not result.wrong) == all(f.verdict not in ("WRONG", "FAILED") for f in found.values())
    return found


class TestTransformers:
    def test_dual(self, folders, capsys, in_process):
        found = findings(folders / "dual", capsys)
        for mode in ("short", "long"):
            assert found["transformers", mode].verdict == "right"
            assert found["transformers", mode].max_error < 1e-3
        crossing = found["transformers", "crossing"]
        assert crossing.verdict == "known limit"
        assert crossing.max_error > 0.1
        assert "longrope2.load" in crossing.note
        assert found["config.json", "every key"].verdict == "right"

    def test_static_long_crosses_rightly(self, folders, capsys, in_process):
        found = findings(folders / "static-long", capsys)
        assert [f.verdict for f in found.values()] == ["right"] * 4

    def test_two_temperatures_are_more_than_it_knows(self, folders, tmp_path, capsys, in_process):
        factors = factors_of(folders, **TWO_TEMPERATURES)
        export(str(folders / "model"), tmp_path / "e", factors=factors, profile="dual")
        found = findings(tmp_path / "e", capsys)
        assert found["transformers", "short"].verdict == "WRONG"
        assert "short factors at an attention factor of 1.2000" in found["transformers", "short"].note
        assert "it knows one attention factor" in found["transformers", "short"].note
        assert found["transformers", "long"].verdict == "right"

    @pytest.mark.parametrize(
        ("key", "mode", "nearest"),
        [
            ("attention_factor", "short", "short factors at an attention factor of 1.1180"),
            ("attention_factor", "long", "long factors at an attention factor of 1.1180"),
            ("original_max_position_embeddings", "long", "short factors at an attention factor of 0.9000"),
        ],
    )
    def test_a_dropped_key_is_wrong(self, dual, capsys, in_process, key, mode, nearest):
        def drop(config):
            config.pop(key, None)
            del config["rope_parameters"][key], config["rope_scaling"][key]

        edit_config(dual, drop)
        found = findings(dual, capsys)
        assert found["config.json", "every key"].verdict == "WRONG"
        assert f"rope_scaling.{key} is missing" in found["config.json", "every key"].note
        assert found["transformers", mode].verdict == "WRONG"
        assert nearest in found["transformers", mode].note

    def test_keys_of_other_readers_are_held_too(self, dual, capsys, in_process):
        edit_config(dual, lambda config: config["rope_scaling"].pop("long_mscale"))
        found = findings(dual, capsys)
        assert found["config.json", "every key"].note == "rope_scaling.long_mscale is missing"
        assert found["transformers", "long"].verdict == "right"

    def test_changed_weights_of_the_engine(self, folders, capsys, monkeypatch):
        """An engine that answers something else altogether is nearest to nothing, and wrong."""

        def ask(engine, _, job, __):
            answers = [{"tokens": [1] * n, "logprobs": [{"5": -1.0, "6": -2.0}] * n} for n in job["new_tokens"]]
            return {"version": "odd 1", "answers": answers}

        monkeypatch.setattr(verifying, "_ask", ask)
        found = findings(folders / "static-long", capsys)
        assert [f.verdict for f in found.values()] == ["right", "WRONG", "WRONG", "WRONG"]
        broken = {"tokens": [1], "logprobs": [{"5": float("nan"), "6": -1.0}]}
        monkeypatch.setattr(
            verifying, "_ask", lambda *a: {"version": "odd 2", "answers": [broken] * len(a[2]["prompts"])}
        )
        found = findings(folders / "static-long", capsys)
        assert found["odd", "long"].verdict == "WRONG"
        assert "not finite" in found["odd", "long"].note

    def test_folders_made_by_other_means(self, folders, tmp_path, capsys, in_process):
        """A longrope folder that is no export is held to its factors, but not to keys that only exports write."""
        model = load(folders / "model", device="cpu").model
        longrope2.load(model, family_factors(model)).save_pretrained(tmp_path / "saved")
        for factors, verdict in ((None, "right"), ({}, "right"), ({"long_attention_factor": 1.5}, "WRONG")):
            if factors is not None:
                family_factors(model, **factors).save(tmp_path / "saved" / "factors.json")
            found = findings(tmp_path / "saved", capsys)
            assert ("config.json", "every key") not in found
            assert found["transformers", "long"].verdict == verdict


class TestEngines:
    def test_those_not_installed_are_named_with_their_command(self, folders, capsys, in_process, monkeypatch):
        monkeypatch.setattr(verifying, "is_installed", lambda engine: engine is TRANSFORMERS)
        result = verify(folders / "static-long", VerifyConfig())
        assert not result.wrong
        assert [row[-1] for row in result.table().rows].count("not checked") == 2
        notes = result.table().caption.splitlines()
        assert "vllm: not installed: pip install vllm" in notes
        assert "mlx: not installed: pip install mlx-lm" in notes
        with pytest.raises(LongRopeError, match="vllm is not installed here") as caught:
            verify(folders / "dual", VerifyConfig(engines=("vllm",)))
        assert "--engine vllm=PYTHON" in caught.value.hint

    def test_names(self, folders):
        with pytest.raises(LongRopeError, match="engine 'ollama' is not known"):
            verify(folders / "dual", VerifyConfig(engines=("ollama",)))
        with pytest.raises(LongRopeError, match=r"llama.cpp cannot run dual"):
            verify(folders / "dual", VerifyConfig(engines=("llama.cpp",)))

    def test_what_is_no_export(self, folders, tmp_path):
        (tmp_path / "text.txt").touch()
        for place, message in (
            (folders, r"config\.json: cannot be read \(No such file or directory\)"),
            (tmp_path / "text.txt", r"text\.txt: a file, and not a \.gguf one"),
            (tmp_path / "nowhere", "nowhere: no such file or folder"),
            (folders / "model", "^the model's config has no factors of its own"),
        ):
            with pytest.raises(LongRopeError, match=message) as caught:
                verify(place, VerifyConfig())
            assert "`longrope2 export` writes them" in caught.value.hint

    def test_a_trained_model_with_the_factors_of_an_export_is_no_export(self, dual, capsys, in_process):
        """Whose config.json has the keys that `train` writes, and is not held to those of `export`."""
        model = load(dual, device="cpu").model
        (dual / "README.md").unlink()
        model.config.save_pretrained(dual)
        found = findings(dual, capsys)
        assert ("config.json", "every key") not in found
        assert found["transformers", "short"].verdict == found["transformers", "long"].verdict == "right"

    def test_damaged_exports(self, dual):
        (dual / "model.safetensors").write_bytes(b"short")
        with pytest.raises(LongRopeError, match="its weights cannot be loaded"):
            _ = Reference(dual).model
        edit_config(dual, lambda config: config.update(rms_norm_eps="small"))
        with pytest.raises(LongRopeError, match=r"llama model: .* its config \(.*'rms_norm_eps' expected float"):
            verify(dual, VerifyConfig())
        edit_config(dual, lambda config: config.update(model_type="odd"))
        with pytest.raises(LongRopeError, match="'odd' is not a model_type"):
            verify(dual, VerifyConfig())
        for content, message in (
            ("{", "not valid JSON"),
            ("[]", "expected a JSON object"),
            ("{}", "not the config of a model"),
        ):
            (dual / "config.json").write_text(content)
            with pytest.raises(LongRopeError, match=message):
                verify(dual, VerifyConfig())

    def test_an_engine_that_fails_is_not_passed(self, folders, capsys, tmp_path):
        python = tmp_path / "python"
        python.write_text("#!/bin/sh\necho 'ValueError: no such rope' >&2\necho 'bye' >&2\nexit 3\n")
        python.chmod(0o755)
        found = findings(folders / "static-long", capsys, f"vllm={python}")
        assert found["vllm", "long"].verdict == "FAILED"
        assert found["vllm", "long"].note == "it failed: ValueError: no such rope"
        log = "(Worker pid=1) ERROR [multiproc_executor.py:953] ValueError: only one style"
        python.write_text(f"#!/bin/sh\necho '{log}'\necho 'RuntimeError: see above' >&2\nexit 1\n")
        found = findings(folders / "static-long", capsys, f"vllm={python}")
        assert found["vllm", "long"].note == "it failed: ValueError: only one style"
        found = findings(folders / "static-long", capsys, f"vllm={tmp_path / 'nowhere'}")
        assert "could not be run" in found["vllm", "short"].note
        found = findings(folders / "static-long", capsys, "vllm=/bin/true")
        assert found["vllm", "short"].note == "it left no answers: /bin/true cannot import it"

    def test_what_engines_do(self):
        """The table behind cards, docs and expectations."""
        factors = tiny_factors(**TWO_TEMPERATURES)
        long = {"factors": factors, "length": WINDOW + 1, "capacity": WINDOW}
        short = {"factors": factors, "length": 8, "capacity": EXTENDED}
        sides = {name: (engine.is_long(**long), engine.is_long(**short)) for name, engine in verifiable().items()}
        assert sides == {
            "transformers": (True, False), "vllm": (False, True), "llama.cpp": (False, True), "mlx": (True, True),
        }  # fmt: skip
        assert [name for name, engine in verifiable().items() if engine.fault(factors, "llama")] == [
            "transformers",
            "mlx",
        ]
        assert "use --profile static-long --fold-temperature" in MLX.fault(factors, "llama")
        static = profiled(factors, "static-long")
        assert TRANSFORMERS.fault(static, "llama") is None
        assert "use --fold-temperature" in MLX.fault(static, "llama")
        forced = forced_temperature(factors)
        assert MLX.fault(tiny_factors(long_attention_factor=forced), "llama") is None
        assert "not known to run gemma models" in MLX.fault(tiny_factors(long_attention_factor=forced), "gemma")
        assert "use --profile static-long" in VLLM.fault(factors, "olmo2")
        assert VLLM.fault(static, "olmo2") is None
        commands = [command for _, command, _ in guidance(factors, "llama", "m.gguf", "gguf")]
        assert commands == [
            "llama-server -m m.gguf -c 1024 --parallel 1",
            "llama-server -m m.gguf -c 256 --parallel 1 --yarn-attn-factor 0.833333",
        ]
        assert LLAMA_CPP.fault(factors, "llama") is VLLM.fault(factors, "llama") is None
        advice = {name: text for name, _, text in guidance(static, "llama", "m", "huggingface")}
        assert advice["TGI"].startswith("do not")
        assert "5.20" not in advice["transformers"]
        advice = {name: text for name, _, text in guidance(static, "gemma3_text", "m", "huggingface")}
        assert "not with 5.17 to 5.20" in advice["transformers"]
        plain = profiled(tiny_factors(), "static-long")
        assert "long factors" in {name: text for name, _, text in guidance(plain, "llama", "m", "huggingface")}["TGI"]

    def test_the_docs_say_what_each_does(self):
        assert undocumented() == []


def undocumented():
    """Engines without a row in the table of docs/serving.md."""
    lines = (Path(__file__).parents[2] / "docs" / "serving.md").read_text().splitlines()
    rows = [line.split("|")[1].strip(" `") for line in lines if line.startswith("| ")]
    return [engine.title for engine in ENGINES.values() if not any(row.startswith(engine.title) for row in rows)]


def test_one_forward_serves_prompts_that_begin_alike(folders):
    reference, calls = Reference(folders / "dual"), []
    tokens = torch.arange(WINDOW + 5).tolist()
    cases = [(8, False), (WINDOW, False), (WINDOW, True), (WINDOW + 5, True), (8, False)]
    answers = []
    for number, (length, long) in enumerate(cases):
        right = reference.logprobs(tokens[:length], long=long)
        answers.append(Answer(tokens[:length], long, {1: float(right[1]), 2: float(right[2]) + 0.1 * number}))
    answers.append(Answer([5, *tokens[:20]], False, answers[0].logprobs))
    reference.model.register_forward_pre_hook(lambda *_, **kwargs: calls.append(1))
    found = reference.errors(answers)
    assert found[:-1] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4], abs=1e-4)
    assert found[-1] > 0.01
    assert len(calls) == 3  # the longest of each side, and the one that begins otherwise


class TestSwitchingPlugin:
    """vLLM where its environment has our plugin; here it is our own forward that answers."""

    @pytest.fixture(autouse=True)
    def installed(self, monkeypatch):
        monkeypatch.setattr(verifying, "_has_plugin", lambda entry_point, python: python == "with-plugin")

    @staticmethod
    def answer(monkeypatch, path, *, switch_length, noted):
        """As an engine that switches at one length and reports another."""
        reference = Reference(path)

        def ask(engine, _, job, __):
            assert job["switches"]
            answers = []
            for prompt, count in zip(job["prompts"], job["new_tokens"], strict=True):
                tokens, steps = [], []
                for _ in range(count):
                    read = prompt + tokens
                    top = reference.logprobs(read, long=len(read) > switch_length).topk(8)
                    steps.append(dict(zip(map(str, top.indices.tolist()), top.values.tolist(), strict=True)))
                    tokens.append(int(top.indices[0]))
                    assert len(read) < job["capacity"] <= EXTENDED
                answers.append({"tokens": tokens, "logprobs": steps})
            return {"version": "vllm 1 with longrope2", "answers": answers, "switch_length": noted}

        monkeypatch.setattr(verifying, "_ask", ask)

    @pytest.mark.parametrize("recorded", [None, 100, 300])
    def test_right_on_both_sides_and_across(self, dual, capsys, monkeypatch, recorded):
        if recorded:
            store_switch_length(dual, recorded)
        length = recorded or WINDOW
        self.answer(monkeypatch, dual, switch_length=length, noted=length)
        found = findings(dual, capsys, "vllm=with-plugin")
        modes = {mode: finding.verdict for (engine, mode), finding in found.items() if engine == "vllm"}
        assert modes == {"short": "right", "crossing": "right", "long": "right"}

    def test_every_token_counts(self, dual, capsys, monkeypatch):
        self.answer(monkeypatch, dual, switch_length=WINDOW + 1, noted=WINDOW)
        found = findings(dual, capsys, "vllm=with-plugin")
        assert found["vllm", "short"].verdict == "right"
        assert found["vllm", "crossing"].verdict == found["vllm", "long"].verdict == "WRONG"
        assert "short factors" in found["vllm", "long"].note

    def test_a_plugin_that_is_not_used(self, dual, capsys, monkeypatch):
        self.answer(monkeypatch, dual, switch_length=0, noted=None)
        found = findings(dual, capsys, "vllm=with-plugin")
        assert found["vllm", "-"].note == "its plugin has a switch length of no, not 256"
        assert found["vllm", "short"].verdict == "WRONG"

    def test_where_it_is_not_asked_for(self, folders):
        """Without it, and with one RoPE for all lengths, vLLM chooses by its window."""
        asked = []
        engine = verifiable()["vllm"]
        for place, python in (("dual", "without"), ("static-long", "with-plugin")):
            reference = Reference(folders / place)
            runs = verifying._asked(reference, "vllm", python)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(verifying, "_ask", lambda engine, *_: asked.append(engine.chooses) or {})
                list(runs)
        assert asked == [engine.chooses] * 4 == ["capacity"] * 4


def test_plugins_are_found_in_an_environment(tmp_path):
    assert verifying._has_plugin(("console_scripts", "pytest"), sys.executable)
    assert not verifying._has_plugin(("console_scripts", "no-such"), sys.executable)
    assert not verifying._has_plugin(("console_scripts", "pytest"), str(tmp_path / "nowhere"))


class TestCommands:
    def test_export_and_verify(self, tmp_path, monkeypatch):
        """The commands as typed, the probe in a process of its own, and the exit code."""
        tiny_factors(**ONE_TEMPERATURE).save(tmp_path / "f.json")
        arguments = ["export", "tiny", "--factors", str(tmp_path / "f.json"), "-o", str(tmp_path / "e")]
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code == 0, result.output
        result = CliRunner().invoke(cli, ["verify", str(tmp_path / "e"), "--engine", "transformers"])
        assert result.exit_code == 0, result.output
        assert result.output.count(" right") == 3
        edit_config(tmp_path / "e", lambda config: config.pop("rope_scaling"))
        monkeypatch.setattr(verifying, "_chosen", lambda *_: [])
        monkeypatch.setattr(sys, "argv", ["longrope2", "verify", str(tmp_path / "e")])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 1

    def test_a_server_that_cannot_be_deleted_keeps_nobody_waiting(self, tmp_path):
        """As xllamacpp's now and then: it waits for its own threads."""
        (tmp_path / "xllamacpp.py").write_text(STUCK_WHEN_DELETED)
        job = {"path": "m.gguf", "capacity": 256, "threads": 1, "temperature_ratio": 1.0, "prompts": [[1, 2]]}
        (tmp_path / "job.json").write_text(json.dumps({**job, "new_tokens": [1]}))
        command = [sys.executable, probe.__file__, "ask_llama_cpp", tmp_path / "job.json", tmp_path / "answers.json"]
        options = {"env": os.environ | {"PYTHONPATH": str(tmp_path)}, "timeout": 30}
        subprocess.run(command, check=True, **options)
        assert json.loads((tmp_path / "answers.json").read_text())["answers"] == [
            {"tokens": [7], "logprobs": [{"7": -0.5}]}
        ]
        (tmp_path / "job.json").write_text(json.dumps(job))
        failed = subprocess.run(command, check=False, stderr=subprocess.PIPE, **options)
        assert failed.returncode == 1
        assert b"KeyError: 'new_tokens'" in failed.stderr

    def test_mistakes(self, tmp_path):
        for arguments in (["--dtype", "q8_0"], ["--factors", "nowhere.json"], []):
            result = CliRunner().invoke(cli, ["export", "tiny", "-o", str(tmp_path / "e"), *arguments])
            assert isinstance(result.exception, LongRopeError)
            assert "\n" not in result.exception.message
        assert not (tmp_path / "e").exists()


class TestOtherReaders:
    """Engines that cannot share an environment with us: each gets one of its own."""

    @staticmethod
    def environment(folder, *packages):
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = str(folder / "bin" / "python")
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        return python

    @pytest.mark.slow
    @pytest.mark.network
    def test_mlx(self, tmp_path, capsys):
        python = self.environment(tmp_path / "venv", "mlx[cpu]==0.32.4", "mlx-lm==0.32.2")
        factors = tiny_factors(**ONE_TEMPERATURE)
        for fold, verdict in ((True, "right"), (False, "WRONG")):
            place = tmp_path / verdict
            export("tiny", place, factors=factors, profile="static-long", fold_temperature=fold, dtype="float32")
            found = findings(place, capsys, f"mlx={python}")
            assert {f.verdict for f in found.values() if f.engine.startswith("mlx")} == {verdict}
        # What docs/upstream offers to mlx-lm makes the last one right.
        (installed,) = (tmp_path / "venv").glob("lib/python3.*/site-packages")
        patch = Path(__file__).parents[2] / "docs" / "upstream" / "mlx-lm-long-mscale.patch"
        subprocess.run(["git", "apply", patch], cwd=installed, check=True)
        found = findings(place, capsys, f"mlx={python}")
        assert {f.verdict for f in found.values() if f.engine.startswith("mlx")} == {"right"}

    @pytest.mark.slow
    @pytest.mark.network
    def test_transformers_4(self, tmp_path, capsys):
        python = self.environment(
            tmp_path / "venv", "transformers==4.57.6", f"torch=={torch.__version__.split('+')[0]}"
        )
        for profile in ("dual", "static-long"):
            place = tmp_path / profile
            export("tiny", place, factors=tiny_factors(**ONE_TEMPERATURE), profile=profile)
            found = findings(place, capsys, f"transformers={python}")
            assert found["transformers", "short"].verdict == found["transformers", "long"].verdict == "right"
