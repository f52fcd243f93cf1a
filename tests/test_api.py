"""`import longrope2`: eleven names, each typed and documented, and the commands as functions."""

import inspect
import json
import shutil
from pathlib import Path

import pytest

import longrope2
from longrope2.errors import LongRopeError, ModelError
from longrope2.factors import RescaleFactors
from longrope2.models import ASSETS, describe, rescale_model


def test_eleven_names_typed_and_documented():
    assert len(longrope2.__all__) == 11
    assert set(longrope2.__all__) <= set(dir(longrope2))
    for name in longrope2.__all__:
        value = getattr(longrope2, name)
        assert inspect.getdoc(value), name
        if inspect.isfunction(value):
            signature = inspect.signature(value)
            assert signature.return_annotation is not inspect.Signature.empty, name
            assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values()), name


def test_the_reference_names_all():
    root = Path(__file__).parent.parent
    page = (root / "docs" / "reference.md").read_text()
    assert "There are eleven names" in page
    assert "all eleven public names" in (root / "README.md").read_text()
    assert [name for name in longrope2.__all__ if f"`{name}" not in page] == []


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'serach'"):
        _ = longrope2.serach


def test_rescale_takes_a_name_or_a_description():
    expected = rescale_model(describe("tiny"), "yarn", 1024)
    assert longrope2.rescale("tiny", "yarn", 1024) == expected
    assert longrope2.rescale(longrope2.describe("tiny"), "yarn", 1024) == expected
    assert longrope2.rescale("tiny", "yarn-rcd", "1k", critical_dimension=8).critical_dimension == 8
    for wrong in ("1 z", -1, 2.5, True):
        with pytest.raises(LongRopeError, match="is not a length"):
            longrope2.rescale("tiny", "yarn", wrong)


def test_search_evaluate_and_export_give_values_and_print_nothing(tmp_path, capsys):
    small = {"documents": 1, "population": 1, "parents": 1, "iterations": 0}
    found = longrope2.search_factors("tiny", 512, tmp_path / "search", **small)
    assert found == RescaleFactors.load(tmp_path / "search/factors.json")
    result = longrope2.evaluate(
        "tiny", ["perplexity"], tmp_path / "scores", factors=found,
        tasks=("full",), lengths=(256,), samples=1,
    )  # fmt: skip
    written = json.loads((tmp_path / "scores/results.json").read_text())
    assert {**result, "checksum": written["checksum"]} == written
    assert [score["length"] for score in result["scores"]] == [256]
    again = longrope2.evaluate(
        "tiny", ["perplexity"], tmp_path / "scores", factors=str(tmp_path / "search/factors.json"),
        tasks=("full",), lengths=(256,), samples=1,
    )  # fmt: skip
    assert again["scores"] == result["scores"]
    assert {path.name for path in tmp_path.iterdir()} == {"search", "scores"}
    folder = longrope2.export_model("tiny", tmp_path / "tiny-512", factors=found)
    assert longrope2.load(folder).longrope2.factors.long == found.long
    assert capsys.readouterr().out == ""


def test_a_search_from_a_rescaled_model_keeps_what_it_does_within_its_window(tmp_path):
    model = shutil.copytree(ASSETS / "tiny", tmp_path / "linear")
    config = json.loads((model / "config.json").read_text())
    scaling = {"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 256}
    config |= {"max_position_embeddings": 512, "rope_parameters": {"rope_theta": 10000.0, **scaling}}
    (model / "config.json").write_text(json.dumps(config))
    small = {"documents": 1, "population": 1, "parents": 1, "iterations": 0}
    with pytest.raises(ModelError, match="already rescaled by 'linear'"):
        longrope2.search_factors(model, 1024, **small)
    found = longrope2.search_factors(model, 1024, extend_again=True, **small)
    assert set(found.short) == {2.0}
    assert found.short == longrope2.rescale(model, "pi", 1024, extend_again=True).short


def test_words_that_a_command_would_refuse_are_refused_from_python_too(tmp_path):
    factors, output = longrope2.rescale("tiny", "yarn", 512), tmp_path / "output"
    refused = {
        "backend 'jax' is not known": lambda: longrope2.evaluate(
            "tiny", ["niah"], output, factors=factors, backend="jax"
        ),
        'profile must be "dual" or "static-long" or "auto", got "static"': lambda: longrope2.export_model(
            "tiny", output, factors=factors, profile="static"
        ),
        'format must be "huggingface" or "gguf", got "onnx"': lambda: longrope2.export_model(
            "tiny", output, factors=factors, format="onnx"
        ),
        'dtype must be "float32" or .* or "q8_0", got "half"': lambda: longrope2.export_model(
            "tiny", output, factors=factors, dtype="half"
        ),
    }
    for message, call in refused.items():
        with pytest.raises(LongRopeError, match=message):
            call()
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_results_may_be_named_by_text(tmp_path):
    (tmp_path / "results.json").write_text('{"needle": {"512": 0.5}}')
    factors = longrope2.rescale("tiny", "yarn", 512)
    folder = longrope2.export_model("tiny", tmp_path / "export", factors=factors, results=f"{tmp_path}/results.json")
    assert "| needle · 512 | 0.5 |" in (folder / "README.md").read_text()


def test_a_search_from_python_knows_tensor_parallel():
    with pytest.raises(LongRopeError, match="1 processes cannot form groups of 2"):
        longrope2.search_factors("tiny", 512, tensor_parallel=2)


def test_a_search_from_python_keeps_out_of_the_folders_of_other_things(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(LongRopeError, match="neither empty nor a run of `longrope2 search`"):
        longrope2.search_factors("tiny", 512, tmp_path, documents=1)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
