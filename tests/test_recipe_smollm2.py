"""The SmolLM2 recipe, as far as it can be tried without its model."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import longrope2
from longrope2.books import read_books
from longrope2.data.config import read_mix
from longrope2.evaluation.compare import compare
from longrope2.evaluation.config import EvaluationConfig
from longrope2.evaluation.results import accuracy
from longrope2.records import EvaluationRecord
from longrope2.search.config import search_config
from longrope2.training.config import train_config

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
            options = recipe.evaluation(name, row)
            config = EvaluationConfig(**{**options, "suites": tuple(options["suites"])})
            assert all(length <= row.length for length in config.lengths)


def test_every_row_has_a_mix_of_its_length_with_enough_rows(recipe):
    for row in recipe.ROWS.values():
        if row.make is None:
            continue
        settings = read_mix(RECIPE / f"{row.mix}.toml")
        assert settings["target_length"] == settings["buckets"][-1].up_to == row.length
        assert {source.path for source in settings["sources"]} <= {"books", *recipe.RECALL}
        tokens_a_step = recipe.BATCH_ROWS * 32 * 1024
        assert settings["rows"] * row.length >= row.steps * tokens_a_step


def test_every_row_can_be_trained_with_its_options(recipe):
    for row in recipe.ROWS.values():
        train_config(window=row.window, **row.training).check()
    assert recipe.ROWS["lora-also"].training == {**recipe.ROWS["lora"].training, "also": ("norms", "embeddings")}


def test_sources_of_a_mix_are_made_and_put_in_place(recipe, tmp_path, monkeypatch):
    """With documents of a size that fits the tiny model's books."""
    data = tmp_path / 'my "data"'
    books = data / "books" / "train"
    books.mkdir(parents=True)
    (books / "a.txt").write_text(next(iter(read_books())).text, encoding="utf-8")
    monkeypatch.setattr(recipe, "RECALL", dict.fromkeys(recipe.RECALL, (512, 3, 2)))
    planned = []
    monkeypatch.setattr(
        recipe, "plan_documents", lambda model, path, *, config, seed, cache: planned.append((config, seed))
    )
    bench = recipe.Bench(model="tiny", data=data, output=tmp_path / "out")
    bench.__dict__["base"] = "tiny"
    (tmp_path / "out").mkdir()
    bench.plan("mix-32k", 1)
    config, seed = planned[0]
    assert seed == 1
    sources = read_mix(config)["sources"]
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
        score = accuracy([1.0], suite=suites[0], task=output.name, length=8, metric="m", asked="q")
        EvaluationRecord(
            name="base", model=model, factors=None, notes=("n",), scores=(replace(score, each=None),), grids={},
            values={score.place: score.each}, config={}, versions={}, processes=1, device="cpu", seconds=1.0,
            revision="r", weights="w", backend="torch", window=8,
        ).save(output / "results.json")  # fmt: skip

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
    assert list(row["values"]) == ["niah/needles/8", "short/mmlu/8"]
    assert row["cost"]["evaluate_seconds"] == 2.0
    compared = compare([tmp_path / "base.json"])
    assert [(run.name, run.notes) for run in compared.runs] == [("original", ("n", "n"))]


@pytest.fixture(scope="module")
def ranks():
    spec = importlib.util.spec_from_file_location("smollm2_ranks", RECIPE / "ranks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_factors_to_rank_are_those_that_results_hold(recipe, tmp_path, monkeypatch):
    blank = longrope2.RescaleFactors(
        method="none", rotary_dim=64, theta=1e5, original_length=8192, target_length=32768, long=(1.0,) * 32,
        short=(1.0,) * 32,
    )  # fmt: skip
    monkeypatch.setattr(recipe, "rescale", lambda model, method, length, **options: replace(blank, method=method))
    bench = recipe.Bench(model="m", data=tmp_path, output=tmp_path)
    bench.__dict__["base"] = "m"
    made = {
        name: row.make(bench, row.length, tmp_path) for name, row in recipe.ROWS.items() if row.table == "ranks-32k"
    }
    brief = {name: factors for name, factors in made.items() if name.startswith("brief-")}
    assert len(brief) == 17
    assert made["set-wide-0"].long_attention_factor > 1.1
    assert made["set-wide-0-cold"] == replace(made["set-wide-0"], long_attention_factor=1.0)
    assert made["set-paper-1"].critical_dimension == 20
    stored = json.loads((RECIPE.parents[1] / "results" / "smollm2" / "rows" / "paper.json").read_text())["factors"]
    assert brief["brief-paper"] == longrope2.RescaleFactors.from_json(stored)
    assert {recipe.ROWS[name].steps for name in brief} == {12}


def test_a_correlation_is_that_of_data_made_with_it(ranks):
    rng = np.random.default_rng(1)
    needles = {str(number): float(value) for number, value in enumerate(rng.permutation(12))}
    assert ranks.correlation({name: -value for name, value in needles.items()}, needles)["spearman"] == 1
    assert ranks.correlation(dict(needles), needles)["spearman"] == -1
    assert ranks.correlation(dict(list(needles.items())[:4]), needles) is None
    # Unrelated measures are found significant as often as chance has it.
    unrelated = [
        ranks.correlation(
            {name: float(value) for name, value in zip(needles, rng.normal(size=12), strict=True)}, needles
        )
        for _ in range(60)
    ]
    assert sum(found["p"] < 0.05 for found in unrelated) <= 9
    assert sum(found["low"] <= 0 <= found["high"] for found in unrelated) >= 45


def test_rows_asked_for_other_needles_are_not_compared(ranks):
    rows = {name: {"values": {"niah/niah/32768": {"asked": asked}}} for name, asked in zip("abc", "xyx", strict=True)}
    with pytest.raises(SystemExit, match=r"^b: measured on other needles"):
        ranks.check_questions(rows)


def test_the_published_correlations_are_those_of_the_stored_rows(ranks, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["ranks.py", "-o", str(tmp_path / "ranks.json")])
    ranks.main()
    kept = RECIPE.parents[1] / "results" / "smollm2" / "ranks-32k.json"
    assert json.loads((tmp_path / "ranks.json").read_text()) == json.loads(kept.read_text())
