"""The SmolLM2 recipe, as far as it can be tried without its model."""

import importlib.util
import json
from pathlib import Path

import pytest

from longrope2.books import read_books
from longrope2.data.plan_command import read_config
from longrope2.evaluation.run import EvaluationConfig
from longrope2.search.config import search_config

RECIPE = Path(__file__).parent.parent / "recipes" / "smollm2"


@pytest.fixture(scope="module")
def recipe():
    spec = importlib.util.spec_from_file_location("smollm2_run", RECIPE / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_row_asks_for_evaluations_that_exist(recipe):
    for row in recipe.ROWS.values():
        for name in row.evaluations:
            options = recipe.evaluation(name, row.length)
            config = EvaluationConfig(**{**options, "suites": tuple(options["suites"])})
            assert all(length <= row.length for length in config.lengths)


def test_every_row_has_a_mix_of_its_length_with_enough_rows(recipe):
    for row in recipe.ROWS.values():
        if row.make is None:
            continue
        settings, sources, buckets = read_config(RECIPE / f"{row.mix}.toml")
        assert settings["target_length"] == buckets[-1].up_to == row.length
        assert {source.path for source in sources} <= {"books", *recipe.RECALL}
        tokens_a_step = recipe.BATCH_ROWS * 32 * 1024
        assert settings["rows"] * row.length >= row.steps * tokens_a_step


def test_sources_of_a_mix_are_made_and_put_in_place(recipe, tmp_path, monkeypatch):
    """With documents of a size that fits the tiny model's books."""
    data = tmp_path / 'my "data"'
    books = data / "books" / "train"
    books.mkdir(parents=True)
    (books / "a.txt").write_text(next(iter(read_books())).text, encoding="utf-8")
    monkeypatch.setattr(recipe, "RECALL", dict.fromkeys(recipe.RECALL, (512, 3, 2)))
    planned = []
    monkeypatch.setattr(recipe, "run_plan", lambda model, path, *, config, seed, cache: planned.append((config, seed)))
    bench = recipe.Bench(model="tiny", data=data, output=tmp_path / "out")
    bench.__dict__["base"] = "tiny"
    (tmp_path / "out").mkdir()
    bench.plan("mix-32k", 1)
    config, seed = planned[0]
    assert seed == 1
    _, sources, _ = read_config(config)
    assert [source.path for source in sources] == [str(books), *(f"{tmp_path}/out/recall-{n}k.jsonl" for n in (8, 32))]
    assert len((tmp_path / "out" / "recall-32k.jsonl").read_text().splitlines()) == 3


def test_searches_are_ones_that_can_be_made(recipe, monkeypatch):
    made = []
    monkeypatch.setattr(recipe, "search_factors", lambda model, length, folder, **options: made.append(options))
    bench = recipe.Bench(model="m", data=Path("d"), output=Path("o"))
    bench.__dict__["base"] = "m"
    for name in ("longrope", "paper", "wide", "plain", "all", "paper-64k", "wide-64k"):
        recipe.ROWS[name].make(bench, 32 * 1024, Path("f"))
    for options in made:
        assert search_config(target_length=32 * 1024, **options).problems() == []


def test_a_row_is_what_its_folder_holds(recipe, tmp_path, monkeypatch):
    """Evaluations of another call stay in it, and the model as it is gets the documents of all others."""
    asked = []

    def evaluate(model, *, output, suites, beyond_window, **options):
        asked.append((output.name, beyond_window, options.get("lengths")))
        score = {"suite": suites[0], "task": output.name, "score": 1.0}
        result = {"scores": [score], "values": {output.name: 1}, "grids": {}, "notes": [], "seconds": 1.0}
        result |= {"versions": {}, "device": "cpu"}
        output.mkdir(parents=True)
        (output / "results.json").write_text(json.dumps(result))

    monkeypatch.setattr(recipe, "evaluate", evaluate)
    bench = recipe.Bench(model="m", data=Path("d"), output=tmp_path)
    bench.__dict__["base"] = "m"
    bench.run("base", {"nothing"})
    assert not (tmp_path / "base.json").exists()
    bench.run("base", {"mmlu"})
    bench.run("base", {"needles"})
    assert asked[1] == ("needles", True, tuple(1024 * n for n in (4, 8, 16, 32)))
    row = json.loads((tmp_path / "base.json").read_text())
    assert [score["task"] for score in row["scores"]] == ["needles", "mmlu"]
    assert row["values"] == {"needles": 1, "mmlu": 1}
