"""The collection of factors: every file is whole and says where it comes from, and only what fits a model is given."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from longrope2.cli import cli
from longrope2.collection import COLLECTED, CollectedFactors, collected_for, collection, collection_page, fitting_names
from longrope2.errors import FactorsError
from longrope2.factors import RescaleFactors
from longrope2.models import HUB_ID, describe
from longrope2.rope import RopeSpec

ROOT = Path(__file__).parent.parent
ENTRIES = {each.name: each for each in collection()}


def numbers(value):
    """Every number of a JSON value, and every list of numbers."""
    if isinstance(value, dict):
        return [each for item in value.values() for each in numbers(item)]
    if isinstance(value, list):
        return [tuple(value), *(each for item in value for each in numbers(item))]
    return [value]


def test_entries_for_a_rope_are_found_by_it_alone():
    rope = RopeSpec(rotary_dim=64, theta=100_000.0, original_length=8192)
    assert fitting_names(rope, 32768) == [
        "smollm2-135m-32k-trained", "smollm2-135m-32k-paper", "smollm2-135m-32k-wide"
    ]  # fmt: skip
    assert fitting_names(rope, 20000) == fitting_names(replace(rope, theta=10_000.0), 32768) == []


class TestFiles:
    """What a contribution must have."""

    @pytest.mark.parametrize("path", sorted(COLLECTED.iterdir()), ids=lambda path: path.stem)
    def test_shape(self, path):
        entry = CollectedFactors.load(path)
        assert path.name == f"{entry.name}.json"
        assert re.fullmatch(r"[a-z0-9.-]+", entry.name)
        assert HUB_ID.fullmatch(entry.model)
        assert entry.revision is None or re.fullmatch(r"[0-9a-f]{40}|sha256:[0-9a-f]{16}", entry.revision)
        factors = entry.factors  # which refuses lists of a wrong length, and values that are none
        assert factors.target_length > factors.original_length
        assert max(factors.long) > 1

    @pytest.mark.parametrize("name", ENTRIES)
    def test_provenance(self, name):
        entry = ENTRIES[name]
        assert len(entry.found) > 20
        assert not entry.found.endswith(".")
        for score in entry.scores:
            assert score.by
            assert score.setting
            assert entry.factors.original_length <= score.length <= entry.factors.target_length
            assert score.low is None or score.low <= score.score <= score.high
        if entry.source.startswith("https://"):
            return
        held = numbers(json.loads((ROOT / entry.source).read_text()))
        assert entry.factors.long in held
        assert all(score.score in held for score in entry.scores)

    def test_the_page_is_up_to_date(self):
        page = (ROOT / "docs" / "collection.md").read_text()
        assert collection_page(page) == page  # else: make reference

    def test_published_lists(self, published):
        assert list(ENTRIES["llama-3-8b-128k"].factors.long) == published["llama3_8b_longrope2_long"]
        phi = ENTRIES["phi-3-mini-128k"].factors
        assert list(phi.long) == published["phi3_mini_128k_april_long"]
        assert list(phi.short) == published["phi3_mini_128k_april_short"]

    def test_what_is_said_of_their_form_is_so(self):
        for name, dimension in {"phi-4-mini-128k": 31, "llama-3-8b-128k": 33}.items():
            factors = ENTRIES[name].factors
            assert factors.critical_dimension == dimension
            for i in range(dimension):
                assert math.isclose(factors.long[i], factors.long[dimension] ** (i / dimension), rel_tol=4e-10)
        temperature = math.sqrt(1 + math.log(32) / math.log(4096))
        assert ENTRIES["phi-4-mini-128k"].factors.long_attention_factor == temperature


SMOLLM2 = {"hidden_size": 576, "num_attention_heads": 9, "num_hidden_layers": 2, "max_position_embeddings": 8192}


def model(folder: Path, name: str, **changes) -> str:
    """A config of SmolLM2's RoPE, or of another."""
    place = folder / name
    place.mkdir()
    content = {"model_type": "llama", **SMOLLM2, "rope_theta": 100000.0, **changes}
    (place / "config.json").write_text(json.dumps(content))
    return str(place)


class TestChoice:
    def test_by_name_and_length(self, tmp_path):
        info = describe(model(tmp_path, "SmolLM2-135M-Instruct"))
        assert collected_for(info, "collection", 65536).name == "smollm2-135m-64k-wide"
        assert collected_for(info, "collection/smollm2-135m-32k-wide", None).name == "smollm2-135m-32k-wide"
        with pytest.raises(FactorsError, match=r"3 entries of the collection .* to 32,768 tokens") as caught:
            collected_for(info, "collection", 32768)
        assert "--from collection/smollm2-135m-32k-trained (32k)" in caught.value.hint
        with pytest.raises(FactorsError, match="no entry of the collection"):
            collected_for(info, "collection", 131072)

    def test_another_model_of_the_same_shape(self, tmp_path):
        info = describe(model(tmp_path, "Other-100M"))
        with pytest.raises(FactorsError, match="the collection has no factors of") as caught:
            collected_for(info, "collection", 16384)
        assert "collection/smollm2-135m-16k-wide (for HuggingFaceTB/SmolLM2-135M-Instruct)" in caught.value.hint

    def test_what_does_not_fit_is_refused_with_the_nearest(self, tmp_path):
        info = describe(model(tmp_path, "SmolLM2-135M", rope_theta=10000.0))
        with pytest.raises(FactorsError, match="no factors of the collection fit") as caught:
            collected_for(info, "collection", None)
        assert caught.value.hint.startswith("nearest: smollm2-135m-16k-paper (theta 100000, not 10000)")
        with pytest.raises(FactorsError, match="no factors of the collection fit") as caught:
            collected_for(info, "collection/llama-3-8b-128k", None)
        assert "llama-3-8b-128k (rotary_dim 128, not 64, theta 500000, not 10000)" in caught.value.hint

    @pytest.mark.parametrize("source", ["somewhere", "collection/none", "collection/../x", "collection/"])
    def test_unknown_sources(self, tmp_path, source):
        info = describe(model(tmp_path, "SmolLM2-135M-Instruct"))
        with pytest.raises(FactorsError) as caught:
            collected_for(info, source, 1024)
        assert "collection/" in caught.value.hint


class TestCommands:
    def run(self, *arguments):
        return CliRunner().invoke(cli, [str(word) for word in arguments])

    def test_the_table(self):
        shown = self.run("collection")
        assert shown.exit_code == 0
        assert all(name in shown.stdout for name in ENTRIES)
        assert [each["name"] for each in json.loads(self.run("collection", "--json").stdout)] == list(ENTRIES)

    def test_factors_from_it(self, tmp_path):
        place, file = model(tmp_path, "SmolLM2-135M-Instruct"), tmp_path / "f.json"
        assert self.run("factors", place, "--from", "collection", "--target-length", "64k", "-o", file).exit_code == 0
        found, entry = RescaleFactors.load(file, describe(place).rope), ENTRIES["smollm2-135m-64k-wide"]
        assert found.long == entry.factors.long
        assert found.provenance["collection"] == entry.name
        other = model(tmp_path, "Other")
        told = self.run("factors", other, "--from", f"collection/{entry.name}", "--single", "-o", file)
        assert "Other is another model" in told.output
        assert not RescaleFactors.load(file).switches

    def test_refusals(self, tmp_path):
        place = model(tmp_path, "SmolLM2-135M-Instruct")
        arguments = ("factors", place, "-o", tmp_path / "f.json")
        with_method = self.run(*arguments, "--from", "collection", "--method", "yarn")
        assert "--from takes no --method" in str(with_method.exception)
        assert "method is missing" in str(self.run(*arguments, "--target-length", "16k").exception)
        extended = model(
            tmp_path, "extended", max_position_embeddings=32768,
            rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
        )  # fmt: skip
        taken = ("factors", extended, "-o", tmp_path / "f.json", "--from", "collection/smollm2-135m-64k-wide")
        assert "already rescaled by 'yarn'" in str(self.run(*taken).exception)
        assert self.run(*taken, "--extend-again").exit_code == 0
        assert not (tmp_path / "none").exists()
