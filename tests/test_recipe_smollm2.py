"""The SmolLM2 recipe, as far as it can be tried without its model."""

import importlib.util
from pathlib import Path

import pytest

from longrope2.data.plan_command import read_config
from longrope2.evaluation.run import EvaluationConfig
from longrope2.search.run import SearchConfig

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


def test_every_length_has_a_mix_with_enough_rows(recipe):
    for row in recipe.ROWS.values():
        if row.make is None:
            continue
        settings, sources, buckets = read_config(RECIPE / f"mix-{row.length // 1024}k.toml")
        assert settings["target_length"] == buckets[-1].up_to == row.length
        assert len(sources) == 1
        tokens_a_step = recipe.BATCH_ROWS * 32 * 1024
        assert settings["rows"] * row.length >= row.steps * tokens_a_step


def test_searches_are_ones_that_can_be_made(recipe, monkeypatch):
    made = []
    monkeypatch.setattr(recipe, "search_factors", lambda model, length, folder, **options: made.append(options))
    bench = recipe.Bench(model="m", data=Path("d"), output=Path("o"))
    bench.__dict__["base"] = "m"
    for name in ("longrope", "paper", "wide", "plain", "all"):
        recipe.ROWS[name].make(bench, 32 * 1024, Path("f"))
    for options in made:
        kept = {name: value for name, value in options.items() if name != "iterations"}
        assert SearchConfig(target_length=32 * 1024, **kept).problems() == []
