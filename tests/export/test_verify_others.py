"""`verify` of models that others extended: YaRN, llama3 and linear scaling, as folders and as GGUF files."""

import json
import shutil

import gguf
import numpy as np
import pytest
from check_samples import write_gguf_like
from export_samples import EXTENDED, WINDOW, family_factors, family_folder, tiny_factors

from longrope2 import export_model as export
from longrope2.errors import FactorsError
from longrope2.export import verify as verifying
from longrope2.export.config import VerifyConfig
from longrope2.export.reference import Reference
from longrope2.export.verify import verify
from longrope2.methods import rescale, yarn_temperature
from longrope2.models import describe, load

ORIGINAL = {"original_max_position_embeddings": WINDOW}
SCALINGS = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    "yarn, temperature": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.9, **ORIGINAL},
    "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
    "linear": {"rope_type": "linear", "factor": 4.0},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return family_folder(tmp_path_factory.mktemp("others") / "plain", "llama")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    place = tmp_path_factory.mktemp("gguf") / "e.gguf"
    return export("tiny", place, factors=tiny_factors(), format="gguf", dtype="float32")


def scaled(plain, place, scaling, window=EXTENDED):
    """The same weights with a scaling in their config."""
    folder = shutil.copytree(plain, place)
    config = json.loads((folder / "config.json").read_text())
    config |= {"max_position_embeddings": window, "rope_parameters": {"rope_theta": 10000.0, **scaling}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def asked(folder, *engines, of=None, monkeypatch=None):
    """Findings by mode; probes run here, on another folder where one is named."""
    if monkeypatch is not None:
        job_of = {} if of is None else {"path": str(of)}
        monkeypatch.setattr(verifying, "_ask", lambda engine, _, job, __: engine.probe({**job, **job_of}))
    return {finding.mode: finding for finding in verify(folder, VerifyConfig(engines=engines)).findings}


class TestFolders:
    @pytest.mark.parametrize("name", SCALINGS)
    def test_transformers_is_right(self, name, plain, tmp_path, monkeypatch):
        found = asked(scaled(plain, tmp_path / "m", SCALINGS[name]), "transformers", monkeypatch=monkeypatch)
        assert {mode: finding.verdict for mode, finding in found.items()} == dict.fromkeys(
            ("short", "long", "crossing"), "right"
        )
        assert all(finding.max_error < 1e-3 for finding in found.values())

    @pytest.mark.parametrize("name", SCALINGS)
    def test_an_engine_that_ignores_it_is_wrong(self, name, plain, tmp_path, monkeypatch):
        folder = scaled(plain, tmp_path / "m", SCALINGS[name])
        found = asked(folder, "transformers", of=plain, monkeypatch=monkeypatch)
        assert found["long"].verdict == found["short"].verdict == "WRONG"
        assert "nearest to plain RoPE at an attention factor of 1.0000" in found["long"].note

    def test_a_window_that_was_left_as_it_was(self, plain, tmp_path, monkeypatch):
        """Qwen's documented YaRN."""
        folder = scaled(plain, tmp_path / "m", SCALINGS["yarn"], window=WINDOW)
        assert Reference(folder).factors.target_length == EXTENDED
        found = asked(folder, "transformers", monkeypatch=monkeypatch)
        assert found["long"].verdict == "right"
        assert (
            verify(folder, VerifyConfig(engines=("transformers",)))
            .table()
            .title.startswith(f"{folder}: yarn, 256 → 1,024 tokens")
        )

    def test_what_has_no_one_rope(self, plain, tmp_path):
        for scaling in ({"rope_type": "dynamic", "factor": 4.0}, {"rope_type": "default"}):
            folder = scaled(plain, tmp_path / scaling["rope_type"], scaling)
            with pytest.raises(FactorsError) as caught:
                verify(folder, VerifyConfig())
            assert "longrope, yarn, llama3 or linear" in caught.value.hint


class TestGGUF:
    """In llama.cpp; the files are as its converter writes them."""

    def test_yarn_linear_and_llama3(self, exported, tmp_path):
        original = {"original_context_length": WINDOW}
        cases = {
            "yarn": ({"type": "yarn", "factor": 4.0, **original}, {}, yarn_temperature(4)),
            "temperature": (
                {"type": "yarn", "factor": 4.0, "attn_factor": 0.8, **original},
                {},
                0.8 * yarn_temperature(4),
            ),
            "linear": ({"type": "linear", "factor": 4.0}, {}, 1.0),
        }
        divisors = rescale("llama3", describe("tiny").rope, EXTENDED).long
        cases["llama3"] = (original, {"rope_freqs.weight": np.array(divisors, dtype=np.float32)}, 1.0)
        for name, (scaling, tensors, temperature) in cases.items():
            path = write_gguf_like(exported, tmp_path / f"{name}.gguf", scaling, tensors, window=EXTENDED)
            factors = Reference(path).factors
            assert factors.long_attention_factor == pytest.approx(temperature, rel=1e-6)
            assert max(factors.long) == pytest.approx(4.0)
            found = asked(path, "llama.cpp")
            assert {finding.verdict for finding in found.values()} == {"right"}, name
            assert found["long"].max_error < 1e-3

    def test_another_family_than_llama(self, tmp_path):
        model = family_folder(tmp_path / "model", "qwen2")
        factors = family_factors(load(model, device="cpu").model)
        file = export(str(model), tmp_path / "e.gguf", factors=factors, format="gguf", dtype="float32")
        scaling = {"type": "yarn", "factor": 4.0, "original_context_length": WINDOW}
        path = write_gguf_like(file, tmp_path / "m.gguf", scaling, {}, window=EXTENDED)
        assert type(Reference(path).config).__name__ == "Qwen2Config"
        assert {finding.verdict for finding in asked(path, "llama.cpp").values()} == {"right"}

    def test_a_key_that_llama_cpp_does_not_read(self, exported, tmp_path):
        """What its converter writes for attention_factor changes nothing: `check` says so."""
        scaling = {"type": "yarn", "factor": 4.0, "original_context_length": WINDOW, "yarn_attn_factor": 0.8}
        path = write_gguf_like(exported, tmp_path / "m.gguf", scaling, {}, window=EXTENDED)
        assert Reference(path).factors.long_attention_factor == pytest.approx(yarn_temperature(4))
        assert asked(path, "llama.cpp")["long"].verdict == "right"

    def test_a_file_without_scaling(self, exported, tmp_path):
        path = write_gguf_like(exported, tmp_path / "m.gguf", {}, {}, window=WINDOW)
        with pytest.raises(FactorsError):
            verify(path, VerifyConfig())
        assert gguf.GGUFReader(path).get_field("longrope2.factors") is None
