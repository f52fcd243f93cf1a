"""Exported folders: the same weights, a round trip, and an output that is whole or absent."""

import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch
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
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import longrope2
from conftest import family_model
from longrope2 import export_model as export
from longrope2.errors import FactorsError, LongRopeError, ModelError
from longrope2.export import huggingface, weights
from longrope2.factors import RescaleFactors
from longrope2.files import atomic_folder
from longrope2.models import ASSETS, describe, load, rescale_model
from longrope2.rotary import rescaled

TINY = ASSETS / "tiny"


def stored(folder):
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


class TestWeights:
    def test_they_are_the_same_to_the_bit(self, tmp_path):
        export("tiny", tmp_path / "e", factors=tiny_factors())
        ours, source = stored(tmp_path / "e"), stored(TINY)
        assert ours.keys() == source.keys()
        assert all(torch.equal(ours[name], source[name]) and ours[name].dtype == torch.bfloat16 for name in source)

    def test_shards(self, tmp_path, monkeypatch):
        monkeypatch.setattr(huggingface.write_folder, "__kwdefaults__", {"shard_bytes": 3 << 20})
        export("tiny", tmp_path / "e", factors=tiny_factors())
        files = sorted(file.name for file in (tmp_path / "e").glob("*.safetensors"))
        assert files == [f"model-0000{i}-of-00005.safetensors" for i in range(1, 6)]
        index = json.loads((tmp_path / "e" / "model.safetensors.index.json").read_text())
        for name, file in index["weight_map"].items():
            with safe_open(tmp_path / "e" / file, framework="pt") as content:
                assert name in content.keys()  # noqa: SIM118
        expected, found = stored(TINY), stored(tmp_path / "e")
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        assert index["metadata"]["total_size"] == sum(t.numel() * 2 for t in expected.values())
        assert load(tmp_path / "e", device="cpu").model.num_parameters() > 0
        # An export of shards is a model like any other.
        export(str(tmp_path / "e"), tmp_path / "again", dtype="float32")
        assert stored(tmp_path / "again")["model.norm.weight"].dtype == torch.float32

    def test_memory_is_that_of_a_shard(self, tmp_path, monkeypatch):
        """Each tensor is read when its shard is written, and not before."""
        monkeypatch.setattr(huggingface.write_folder, "__kwdefaults__", {"shard_bytes": 1 << 20})
        events = []
        read = weights._reader

        def noted(file, name):
            inner = read(file, name)

            def call():
                events.append("read")
                return inner()

            return call

        import safetensors.torch

        written = safetensors.torch.save_file
        monkeypatch.setattr(weights, "_reader", noted)
        monkeypatch.setattr(
            safetensors.torch, "save_file", lambda *a, **k: (events.append("write"), written(*a, **k))[1]
        )
        export("tiny", tmp_path / "e", factors=tiny_factors())
        between = "".join(event[0] for event in events).split("w")
        assert len(between) > 5
        assert max(map(len, between)) < 20

    def test_precision(self, tmp_path):
        export("tiny", tmp_path / "e", factors=tiny_factors(), dtype="float16")
        config = json.loads((tmp_path / "e" / "config.json").read_text())
        assert config["dtype"] == config["torch_dtype"] == "float16"
        assert {tensor.dtype for tensor in stored(tmp_path / "e").values()} == {torch.float16}

    def test_a_tensor_of_another_precision_keeps_it(self, tmp_path, monkeypatch):
        from safetensors.torch import save_file

        monkeypatch.setattr(huggingface.write_folder, "__kwdefaults__", {"shard_bytes": 3 << 20})
        shutil.copytree(TINY, tmp_path / "m")
        content = load_file(TINY / "model.safetensors")
        norm = content["model.norm.weight"] = content["model.norm.weight"].float() * 1.0001
        save_file(content, tmp_path / "m" / "model.safetensors")
        export(str(tmp_path / "m"), tmp_path / "e", factors=tiny_factors())
        assert torch.equal(stored(tmp_path / "e")["model.norm.weight"], norm)
        assert json.loads((tmp_path / "e" / "config.json").read_text())["dtype"] == "bfloat16"
        index = json.loads((tmp_path / "e" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in content.values())
        export(str(tmp_path / "m"), tmp_path / "f", factors=tiny_factors(), dtype="bfloat16")
        assert stored(tmp_path / "f")["model.norm.weight"].dtype == torch.bfloat16

    def test_folding(self, tmp_path):
        """The folded export is the unfolded model; its config names the temperature that engines force."""
        factors = tiny_factors(**TWO_TEMPERATURES)
        for name, fold in (("plain", False), ("folded", True)):
            export(
                "tiny", tmp_path / name, factors=factors, profile="static-long", dtype="float32", fold_temperature=fold
            )
        plain, folded = (longrope2.load(str(tmp_path / name), device="cpu") for name in ("plain", "folded"))
        forced = folded.longrope2.factors.long_attention_factor
        assert forced == pytest.approx((1 + torch.tensor(4.0).log() / torch.tensor(256.0).log()).sqrt().item())
        for length in (100, 300):
            tokens = torch.arange(length)[None]
            with torch.no_grad():
                torch.testing.assert_close(plain(tokens).logits, folded(tokens).logits, rtol=1e-4, atol=1e-4)
        config = json.loads((tmp_path / "folded" / "config.json").read_text())
        assert config["rope_scaling"]["long_mscale"] == config["rope_scaling"]["attention_factor"] == forced
        assert "queries multiplied by 1.152" in (tmp_path / "folded" / "README.md").read_text()
        with pytest.raises(LongRopeError, match="weights can hold only one"):
            export("tiny", tmp_path / "no", factors=factors, profile="dual", fold_temperature=True)


class TestProfile:
    """By default an export is right in plain transformers, or is not made."""

    @pytest.mark.parametrize(("temperatures", "expected"), [({}, "dual"), (TWO_TEMPERATURES, "static-long")])
    def test_one_that_every_engine_can_run(self, tmp_path, capsys, temperatures, expected):
        place = export("tiny", tmp_path / "e", factors=tiny_factors(**temperatures), dtype="float32")
        assert RescaleFactors.load(place / "factors.json").provenance["export"]["profile"] == expected
        output = capsys.readouterr().err
        assert "not right in transformers" not in output
        reason = "profile static-long: the attention factors of short (1) and long (1.2) sequences differ"
        assert (reason in output) == (expected == "static-long")

    def test_a_model_trained_with_two_temperatures_asks(self, tmp_path):
        export("tiny", tmp_path / "trained", factors=tiny_factors(**TWO_TEMPERATURES), profile="dual")
        with pytest.raises(LongRopeError, match="plain transformers knows only one") as caught:
            export(str(tmp_path / "trained"), tmp_path / "e")
        assert "--profile dual" in caught.value.hint
        assert "--profile static-long" in caught.value.hint
        assert not (tmp_path / "e").exists()
        assert export(str(tmp_path / "trained"), tmp_path / "e", profile="static-long").is_dir()


class TestRoundTrip:
    @pytest.mark.parametrize("profile", ["dual", "static-long"])
    def test_equal_factors_and_equal_logits(self, tmp_path, profile):
        factors = tiny_factors(**TWO_TEMPERATURES)
        export("tiny", tmp_path / "e", factors=factors, profile=profile, dtype="float32")
        model = longrope2.load(str(tmp_path / "e"), device="cpu")
        found = model.longrope2.factors
        assert found.long == factors.long
        assert found.short == (factors.short if profile == "dual" else factors.long)
        assert found.long_attention_factor == 1.2
        assert found.short_attention_factor == (1.0 if profile == "dual" else 1.2)
        assert (found.original_length, found.target_length) == (WINDOW, EXTENDED)
        base = longrope2.load("tiny", factors, device="cpu")
        for length in (WINDOW, WINDOW + 1):
            tokens = torch.arange(length)[None]
            with torch.no_grad():
                same = torch.allclose(model(tokens).logits, base(tokens).logits, atol=1e-4)
            assert same == (profile == "dual" or length > WINDOW)

    @pytest.mark.parametrize("method", ["cope", "hardclip", "drope"])
    @pytest.mark.parametrize("profile", ["dual", "static-long"])
    def test_dimensions_that_stand_still(self, tmp_path, method, profile):
        """In plain transformers, and through the switch; the export can be exported again."""
        factors = rescale_model(describe("tiny"), method, EXTENDED)
        export("tiny", tmp_path / "first", factors=factors, profile=profile, dtype="float32")
        export(str(tmp_path / "first"), tmp_path / "e")
        wanted = factors if profile == "dual" else factors.long_everywhere()
        model = longrope2.load(str(tmp_path / "e"), device="cpu")
        assert model.longrope2.factors.rotates_as(wanted)
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "e").eval()
        base = load("tiny", device="cpu", dtype=torch.float32).model
        for length in (WINDOW, WINDOW + 1):
            tokens = torch.arange(3, 3 + length)[None]
            with torch.no_grad(), rescaled(base, wanted):
                expected = base(tokens).logits
            with torch.no_grad():
                torch.testing.assert_close(plain(tokens, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)
        prompt = torch.arange(3, 3 + WINDOW - 2)[None]
        written = model.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=None)
        for length in range(WINDOW - 2, WINDOW + 4):
            with torch.no_grad(), rescaled(base, wanted):
                assert base(written[:, :length], use_cache=False).logits[0, -1].argmax() == written[0, length]

    def test_factors_file_is_a_factors_file(self, tmp_path):
        export("tiny", tmp_path / "e", factors=tiny_factors())
        written = RescaleFactors.load(tmp_path / "e" / "factors.json", describe("tiny").rope)
        assert written.long == tiny_factors().long
        assert written.provenance["export"]["profile"] == "dual"

    def test_is_not_extended_a_second_time(self, tmp_path):
        export("tiny", tmp_path / "e", factors=tiny_factors())
        info = describe(tmp_path / "e")
        assert (info.rope.original_length, info.reading.window) == (WINDOW, EXTENDED)
        with pytest.raises(ModelError, match="already rescaled by 'longrope' from 256 to 1,024"):
            rescale_model(info, "yarn", 2048)
        again = tiny_factors(target_length=2048)
        with pytest.raises(ModelError, match="already rescaled by 'longrope' from 256 to 1,024"):
            export(str(tmp_path / "e"), tmp_path / "f", factors=again)
        export(str(tmp_path / "e"), tmp_path / "f", factors=again, extend_again=True)
        assert describe(tmp_path / "f").reading.window == 2048
        # The same factors once more are no second extension, nor is leaving them out.
        export(str(tmp_path / "e"), tmp_path / "g", factors=tiny_factors())
        export(str(tmp_path / "e"), tmp_path / "h", profile="static-long")
        configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in "eg"]
        assert configs[0] == configs[1]
        assert "original_max_position_embeddings" not in json.loads((tmp_path / "h" / "config.json").read_text())

    def test_models_that_carry_factors(self, tmp_path):
        """As `save_pretrained` of a switching model and `train` write them; factors.json says more, if it fits."""
        loaded = load("tiny", device="cpu")
        longrope2.load(loaded.model, tiny_factors()).save_pretrained(tmp_path / "t")
        loaded.tokenizer.save_pretrained(tmp_path / "t")
        for name, factors, method in (
            ("a", None, "longrope"),
            ("b", tiny_factors(method="searched"), "searched"),
            ("c", tiny_factors(method="others", long_attention_factor=1.5), "longrope"),
        ):
            if factors:
                factors.save(tmp_path / "t" / "factors.json")
            export(str(tmp_path / "t"), tmp_path / name)
            assert longrope2.load(str(tmp_path / name), device="cpu").longrope2.factors.long == tiny_factors().long
            assert RescaleFactors.load(tmp_path / name / "factors.json").method == method

    def test_other_models_factors(self, tmp_path):
        with pytest.raises(FactorsError, match="made for another model"):
            export("tiny", tmp_path / "e", factors=tiny_factors(theta=500.0))
        with pytest.raises(LongRopeError, match="tiny carries no factors, and none were given"):
            export("tiny", tmp_path / "e")


class TestCompanions:
    def test_tokenizer_is_copied_word_for_word(self, tmp_path):
        export("tiny", tmp_path / "e", factors=tiny_factors())
        for name in ("tokenizer.json", "generation_config.json"):
            assert (tmp_path / "e" / name).read_bytes() == (TINY / name).read_bytes()
        assert AutoTokenizer.from_pretrained(tmp_path / "e")("It was 1848").input_ids

    @pytest.mark.parametrize("tokenizer", [True, False])
    def test_a_model_without_a_tokenizer_is_told_of(self, tmp_path, capsys, tokenizer):
        model = family_folder(tmp_path / "m", "llama", tokenizer=tokenizer)
        export(str(model), tmp_path / "e", factors=family_factors(family_model("llama")))
        assert ("warning: this export has no tokenizer" in capsys.readouterr().err) is not tokenizer

    def test_tokenizer_of_transformers_5_loads_in_4(self, tmp_path):
        model = family_folder(tmp_path / "m", "llama")
        config = {"tokenizer_class": "TokenizersBackend", "model_max_length": WINDOW}
        (model / "tokenizer_config.json").write_text(json.dumps(config))
        export(str(model), tmp_path / "e", factors=family_factors(load(model, device="cpu").model))
        written = json.loads((tmp_path / "e" / "tokenizer_config.json").read_text())
        assert written == {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": EXTENDED}

    def test_several_chat_templates(self, tmp_path):
        shutil.copytree(TINY, tmp_path / "m")
        tokenizer = AutoTokenizer.from_pretrained(TINY)
        tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
        tokenizer.save_pretrained(tmp_path / "m")
        export(str(tmp_path / "m"), tmp_path / "e", factors=tiny_factors())
        assert AutoTokenizer.from_pretrained(tmp_path / "e").chat_template == tokenizer.chat_template

    def test_a_damaged_tokenizer_config(self, tmp_path):
        shutil.copytree(TINY, tmp_path / "m")
        (tmp_path / "m" / "tokenizer_config.json").write_text("{")
        with pytest.raises(ModelError, match=r"tokenizer_config\.json: not valid JSON"):
            export(str(tmp_path / "m"), tmp_path / "e", factors=tiny_factors())
        assert [file.name for file in tmp_path.iterdir()] == ["m"]

    def test_commands_are_quoted_for_the_shell(self, tmp_path, capsys):
        folder = tmp_path / "my model's 4k"
        export("tiny", folder, factors=tiny_factors(**ONE_TEMPERATURE))
        (command,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("check it with: ")]
        assert shlex.split(command.removeprefix("check it with: ")) == ["longrope2", "verify", str(folder)]
        card = (folder / "README.md").read_text()
        commands = re.findall(r"`((?:vllm|longrope2|python|mlx_lm.generate|text-generation-launcher) [^`]*)`", card)
        assert len(commands) >= 5
        assert all(folder.name in shlex.split(command) for command in commands)

    def test_card(self, tmp_path, capsys):
        results = tmp_path / "results.json"
        results.write_text(json.dumps({"needle": {"1024": 0.98765}, "commit": "abc"}))
        export("tiny", tmp_path / "e", factors=tiny_factors(**ONE_TEMPERATURE), results=results)
        text = (tmp_path / "e" / "README.md").read_text()
        for part in (
            "license: apache-2.0",
            "from 256 to 1,024 tokens",
            "`dual`: the original RoPE up to 256 tokens",
            "`vllm serve e --max-model-len 1024` | exact where longrope2 is installed beside it: each request switches",
            "without, long factors in every sequence, up to 1,024 tokens",
            "`vllm serve e` | short factors, window of 256 tokens",
            "wrong when a cache crosses 256 tokens",
            "use --fold-temperature",
            "| needle · 1024 | 0.9877 |",
            "| 31 | 1.12109 | 5.84375 |",
        ):
            assert part in text
        assert str(tmp_path) not in text
        assert "warning: this export is not right in mlx: it always applies" in capsys.readouterr().err
        score = {"suite": "ruler", "task": "vt", "length": 1024, "metric": "recall", "score": 91.256, "samples": 100}
        results.write_text(json.dumps({"scores": [{**score, "low": 84.1, "high": None}], "versions": {}}))
        export("tiny", tmp_path / "e", factors=tiny_factors(), results=results, force=True)
        assert "| ruler | vt (recall) | 1,024 | 91.26 | 84.1 to - | 100 |" in (tmp_path / "e" / "README.md").read_text()
        results.write_text(json.dumps({"scores": [{"suite": "niah"}]}))  # not ours: shown as any other
        export("tiny", tmp_path / "e", factors=tiny_factors(), results=results, force=True)
        assert "None" not in (tmp_path / "e" / "README.md").read_text()
        results.write_text("[]")
        with pytest.raises(LongRopeError, match="expected a JSON object"):
            export("tiny", tmp_path / "f", factors=tiny_factors(), results=results)

    def test_card_of_one_behaviour(self, tmp_path):
        export("tiny", tmp_path / "e", factors=tiny_factors(), profile="static-long")
        text = (tmp_path / "e" / "README.md").read_text()
        assert "cache crosses" not in text
        assert text.count("long factors in every sequence, up to 1,024 tokens") == 4

    def test_one_rope_is_never_called_dual(self, tmp_path, capsys):
        export("tiny", tmp_path / "e", factors=tiny_factors().long_everywhere())
        assert f"wrote {tmp_path / 'e'}: static-long, 256 → 1,024 tokens" in capsys.readouterr().err
        written = RescaleFactors.load(tmp_path / "e" / "factors.json")
        assert written.provenance["export"]["profile"] == "static-long"


class TestOutput:
    def test_nothing_is_replaced_without_a_word(self, tmp_path):
        export("tiny", tmp_path / "e", factors=tiny_factors())
        (tmp_path / "e" / "old").touch()
        with pytest.raises(LongRopeError, match="exists already"):
            export("tiny", tmp_path / "e", factors=tiny_factors())
        export("tiny", tmp_path / "e", factors=tiny_factors(), force=True)
        assert not (tmp_path / "e" / "old").exists()
        assert [file.name for file in tmp_path.iterdir()] == ["e"]
        (tmp_path / "empty").mkdir()
        export("tiny", tmp_path / "empty", factors=tiny_factors())

    def test_what_is_no_export_is_never_replaced(self, tmp_path):
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / "thesis.tex").touch()
        (tmp_path / "file").touch()
        shutil.copytree(TINY, tmp_path / "base")
        # As a trained model whose factors are those of an export.
        export("tiny", tmp_path / "trained", factors=tiny_factors())
        (tmp_path / "trained" / "README.md").unlink()
        # As a trained model that was given the card of its export.
        export("tiny", tmp_path / "uploaded", factors=tiny_factors())
        tiny_factors().save(tmp_path / "uploaded" / "factors.json")
        refused = "neither empty nor a run of `longrope2 export`"
        messages = {"file": "is a file"} | dict.fromkeys(("home", "base", "trained", "uploaded"), refused)
        before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
        for name, message in messages.items():
            with pytest.raises(LongRopeError, match=message):
                export("tiny", tmp_path / name, factors=tiny_factors(), force=True)
        assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before

    def test_the_model_itself_is_never_replaced(self, tmp_path):
        shutil.copytree(TINY, tmp_path / "source")
        with pytest.raises(LongRopeError, match="is the model itself"):
            export(str(tmp_path / "source"), tmp_path / "source", factors=tiny_factors(), force=True)
        assert (tmp_path / "source" / "README.md").read_bytes() == (TINY / "README.md").read_bytes()
        export("tiny", tmp_path / "e", factors=tiny_factors())
        (tmp_path / "source").rename(tmp_path / "e" / "source")
        with pytest.raises(LongRopeError, match="is the model itself, or holds it"):
            export(str(tmp_path / "e" / "source"), tmp_path / "e", factors=tiny_factors(), force=True)

    @pytest.mark.parametrize("format", ["huggingface", "gguf"])
    def test_no_room_is_known_before_writing(self, tmp_path, monkeypatch, format):
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr(weights.shutil, "disk_usage", lambda _: usage(1 << 40, 1 << 40, 70 << 20))
        place = tmp_path / ("e" if format == "huggingface" else "e.gguf")
        with pytest.raises(LongRopeError, match=r"needs 7\d MB, and 73 MB are free there"):
            export("tiny", place, factors=tiny_factors(), format=format)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("format", ["huggingface", "gguf"])
    def test_room_that_ends_on_the_way(self, tmp_path, format):
        """A quota, or what others write meanwhile; here a limit on files, whose error has another number."""
        place = tmp_path / ("e" if format == "huggingface" else "e.gguf")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, limits[1]))
        try:
            with pytest.raises(LongRopeError, match=r"cannot be written \(.*\)\nhint: make room"):
                export("tiny", place, factors=tiny_factors(), format=format)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert list(tmp_path.iterdir()) == []

    def test_a_link_stays_one(self, tmp_path):
        (tmp_path / "link").symlink_to("disk/e")
        for force in (False, True, True):
            export("tiny", tmp_path / "link", factors=tiny_factors(), force=force)
            assert (tmp_path / "link").is_symlink()
            assert sorted(file.name for file in tmp_path.iterdir()) == ["disk", "link"]
            assert [file.name for file in (tmp_path / "disk").iterdir()] == ["e"]

    def test_a_folder_that_cannot_be_replaced_as_a_whole(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for place in (Path(), Path("e", "..")):
            (tmp_path / "e").mkdir(exist_ok=True)
            with pytest.raises(LongRopeError, match="the folder that you are in"):
                export("tiny", place, factors=tiny_factors())
            (tmp_path / "e").rmdir()
        (tmp_path / "e").mkdir()
        monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "e")
        with pytest.raises(LongRopeError, match=r"e is a mount point.*\nhint: name a folder in it, such as -o .*model"):
            export("tiny", tmp_path / "e", factors=tiny_factors())

    def test_failures_leave_nothing(self, tmp_path, monkeypatch):
        def fails(*_):
            raise OSError(28, "No space left on device")

        export("tiny", tmp_path / "e", factors=tiny_factors())
        before = (tmp_path / "e" / "README.md").read_text()
        monkeypatch.setattr(huggingface, "write_text", fails)
        with pytest.raises(OSError, match="No space"):
            export("tiny", tmp_path / "e", factors=tiny_factors(), force=True)
        with pytest.raises(OSError, match="No space"):
            export("tiny", tmp_path / "f", factors=tiny_factors())
        assert [file.name for file in tmp_path.iterdir()] == ["e"]
        assert (tmp_path / "e" / "README.md").read_text() == before

    def test_killed_while_writing(self, tmp_path, synced):
        """What a kill -9 leaves has another name than the export, and an earlier one stays whole."""
        (tmp_path / "e").mkdir()
        (tmp_path / "e" / "config.json").write_text("old")
        code = (
            "import sys, time; from pathlib import Path; from longrope2.files import atomic_folder\n"
            "with atomic_folder(Path(sys.argv[1])) as folder:\n"
            "    (folder / 'config.json').write_text('new'); print('now', flush=True); time.sleep(60)"
        )
        child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "e")], stdout=subprocess.PIPE)
        assert child.stdout.readline() == b"now\n"
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        assert (tmp_path / "e" / "config.json").read_text() == "old"
        left, _ = sorted(tmp_path.iterdir())
        assert left.name.startswith(".e.partial-")
        (left / "new" / "templates").mkdir()  # as of a tokenizer with several
        with atomic_folder(tmp_path / "e") as folder:
            assert not list(folder.iterdir())
            (folder / "config.json").write_text("newer")
            (folder / "templates").mkdir()
            (folder / "templates" / "tools.jinja").write_text("inside")
            with pytest.raises(LongRopeError, match="another process is writing it"), atomic_folder(tmp_path / "e"):
                pass
        assert [file.name for file in tmp_path.iterdir()] == ["e"]
        assert (tmp_path / "e" / "config.json").read_text() == "newer"
        assert (tmp_path / "e" / "templates" / "tools.jinja").read_text() == "inside"
        files = [file for file in (tmp_path / "e").rglob("*") if file.is_file()]
        assert sorted(file.stat().st_ino for file in files) == sorted(synced)

    def test_stopped_between_the_old_folder_and_the_new_one(self, tmp_path, monkeypatch):
        folder = tmp_path / "e"
        folder.mkdir()
        (folder / "config.json").write_text("old")
        rename = Path.rename

        def interrupted(path, target):
            rename(path, target)
            if Path(target).name == "old":
                raise KeyboardInterrupt

        monkeypatch.setattr(Path, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt), atomic_folder(folder):
            pass
        monkeypatch.undo()
        assert [file.name for file in tmp_path.iterdir()] == ["e"]
        code = (
            "import os, sys; from pathlib import Path; from longrope2.files import atomic_folder\n"
            "with atomic_folder(Path(sys.argv[1])):\n"
            "    Path.rename = lambda path, target: (os.rename(path, target), os.kill(os.getpid(), 9))"
        )
        assert subprocess.run([sys.executable, "-c", code, folder]).returncode == -signal.SIGKILL
        assert not folder.exists()
        with pytest.raises(KeyboardInterrupt), atomic_folder(folder):
            raise KeyboardInterrupt
        assert [file.name for file in tmp_path.iterdir()] == ["e"]
        assert (folder / "config.json").read_text() == "old"


class TestSources:
    def test_quantised_weights_are_refused(self, tmp_path):
        from safetensors.torch import save_file

        model = family_folder(tmp_path / "m", "llama")
        factors = family_factors(load(model, device="cpu").model)
        content = load_file(model / "model.safetensors")
        content["model.norm.weight"] = content["model.norm.weight"].to(torch.int8)
        save_file(content, model / "model.safetensors")
        with pytest.raises(ModelError, match="stored as I8"):
            export(str(model), tmp_path / "e", factors=factors)
        (model / "model.safetensors").write_bytes(b"short")
        with pytest.raises(ModelError, match="cannot be read"):
            export(str(model), tmp_path / "e", factors=factors)
        (model / "model.safetensors").unlink()
        with pytest.raises(ModelError, match=r"no \*.safetensors weights"):
            export(str(model), tmp_path / "e", factors=factors)

    def test_buffers_of_old_checkpoints_are_left_out(self, tmp_path):
        from safetensors.torch import save_file

        model = family_folder(tmp_path / "m", "llama")
        factors = family_factors(load(model, device="cpu").model)
        content = load_file(model / "model.safetensors")
        save_file(
            {**content, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, model / "model.safetensors"
        )
        export(str(model), tmp_path / "e", factors=factors)
        assert stored(tmp_path / "e").keys() == content.keys()

    @pytest.mark.parametrize("sharded", [False, True])
    def test_the_same_weights_in_another_format_are_left_out(self, sharded, tmp_path, monkeypatch):
        from safetensors.torch import save_file

        if sharded:
            monkeypatch.setattr(huggingface.write_folder, "__kwdefaults__", {"shard_bytes": 3 << 20})
        export("tiny", tmp_path / "m", factors=tiny_factors())
        save_file({"layers.0.attention.wq.weight": torch.zeros(4, 4)}, tmp_path / "m" / "consolidated.safetensors")
        export(str(tmp_path / "m"), tmp_path / "e")
        assert stored(tmp_path / "e").keys() == stored(TINY).keys()

    def test_an_index_that_is_none(self, tmp_path, monkeypatch):
        monkeypatch.setattr(huggingface.write_folder, "__kwdefaults__", {"shard_bytes": 3 << 20})
        export("tiny", tmp_path / "m", factors=tiny_factors())
        for content in ("[]", "{", '{"weight_map": 1}'):
            (tmp_path / "m" / "model.safetensors.index.json").write_text(content)
            (tmp_path / "m" / "manifest.json").unlink(missing_ok=True)
            with pytest.raises(ModelError, match="not an index of weights"):
                export(str(tmp_path / "m"), tmp_path / "e")

    def test_a_hub_that_cannot_be_reached(self, monkeypatch):
        asked = {}

        def download(repository, *, revision, allow_patterns):
            asked[repository] = revision
            raise LocalEntryNotFoundError("no connection\nand more")

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        source = weights.SourceModel(replace(describe("tiny"), name="owner/name@v1", location="owner/name@v1"))
        with pytest.raises(ModelError, match=r"owner/name@v1: its files cannot be had from the hub \(no connection\)"):
            _ = source.folder
        assert asked == {"owner/name": "v1"}

    def test_models_with_other_parts(self, tmp_path):
        from transformers import Gemma3Config

        from conftest import family_config

        config = Gemma3Config(text_config=family_config("gemma3_text", max_position_embeddings=WINDOW).to_dict())
        config.save_pretrained(tmp_path / "m")
        factors = family_factors(_Carrier(family_config("gemma3_text", max_position_embeddings=WINDOW)))
        with pytest.raises(LongRopeError, match="more parts than its language model"):
            export(str(tmp_path / "m"), tmp_path / "e", factors=factors)

    @pytest.mark.parametrize("entry", [None, {}, {"rope_type": "default"}])
    def test_an_empty_entry_for_a_kind_of_layers_is_none(self, tmp_path, entry):
        folder = shutil.copytree(TINY, tmp_path / "model")
        edit_config(folder, lambda config: config.update(rope_scaling={"full_attention": entry}))
        export(str(folder), tmp_path / "e", factors=tiny_factors())
        export(str(TINY), tmp_path / "plain", factors=tiny_factors())
        written, plain = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("e", "plain"))
        assert written["rope_parameters"] == plain["rope_parameters"]

    def test_hub_ids_are_downloaded_once_needed(self, tmp_path, monkeypatch):
        snapshot = tmp_path / "snapshots" / "abc"
        shutil.copytree(TINY, snapshot)
        calls = []

        def download(repo, revision=None, allow_patterns=()):
            calls.append((repo, revision, "*.bin" in allow_patterns))
            return str(snapshot)

        monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda *_, **__: None)
        monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: str(snapshot / "config.json"))
        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        with pytest.raises(FactorsError):
            export("owner/name@v2", tmp_path / "e", factors=tiny_factors(theta=500.0))
        assert calls == []
        export("owner/name@v2", tmp_path / "e", factors=tiny_factors())
        assert calls == [("owner/name", "v2", False)]
        assert "owner/name@v2 with its context window" in (tmp_path / "e" / "README.md").read_text()


class _Carrier:
    def __init__(self, config):
        self.config = config
