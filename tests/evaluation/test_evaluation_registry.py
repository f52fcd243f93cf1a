"""A suite is one object: a new one is seen wherever the others are."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from longrope2.cli import cli, main
from longrope2.errors import LongRopeError
from longrope2.evaluation.config import EvaluationConfig
from longrope2.evaluation.results import accuracy, with_averages
from longrope2.evaluation.suite import Suite, SuiteOutcome
from longrope2.evaluation.suites import SUITES
from longrope2.report.summary import summarise

DOCS = Path(__file__).parents[2] / "docs" / "evaluation.md"


def run(setup, engine) -> SuiteOutcome:
    """Every other answer is right, whatever the model; as some libraries do, it prints on stdout."""
    print("a riddle")
    scores = [float(index % 2 == 0) for index in range(setup.samples or 10)]
    return SuiteOutcome(
        measured=with_averages(
            accuracy(scores, suite="riddles", task=task, length=length, metric="right", asked=f"{task} {length}")
            for length in setup.lengths
            for task in setup.tasks
        )
    )


RIDDLES = Suite(
    name="riddles",
    title="Riddles of the Sphinx",
    tasks=("easy", "hard"),
    run=run,
    samples=10,
    cells=100,
    every_length=True,
    heads={"hard": "Hard ones"},
    summary="riddles",
    note="with answers",
    row="`easy`, `hard` | right answers | all | 10",
)


@pytest.fixture(autouse=True)
def riddles(monkeypatch):
    monkeypatch.setitem(SUITES, "riddles", RIDDLES)


def command(monkeypatch, capsys, *arguments) -> str:
    monkeypatch.setattr(sys, "argv", ["longrope2", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    out, error = capsys.readouterr()
    assert not ended.value.code, error
    return out


def test_in_help_and_in_messages():
    text = " ".join(CliRunner().invoke(cli, ["evaluate", "--help"]).output.split())
    assert "Suites: ruler, niah (needle in a haystack), niah_wordings (" in text
    assert "and riddles (with answers)." in text
    assert EvaluationConfig(suites=("riddles",)).tasks_of("riddles") == ("easy", "hard")
    with pytest.raises(LongRopeError) as caught:
        EvaluationConfig(suites=("ridles",))
    assert caught.value.hint.startswith("did you mean 'riddles'? there are ruler, ")


def test_in_the_tables_of_evaluate_and_compare(tmp_path, monkeypatch, capsys):
    options = ["--suite", "riddles", "--lengths", "64,128", "-o", tmp_path / "run"]
    shown = command(monkeypatch, capsys, "evaluate", "tiny", *options)
    assert "original: Riddles of the Sphinx" in shown
    assert "Hard ones" in shown
    assert "50.0 (23.7–76.3)" in shown
    assert "a riddle" not in shown
    shown = command(monkeypatch, capsys, "compare", tmp_path / "run", f"b={tmp_path / 'run'}", "--against", "b")
    assert "Riddles of the Sphinx\n" in shown
    assert "Riddles of the Sphinx, against b" in shown
    assert "+0.0" in shown


def test_in_the_summary_of_a_report():
    scores = run(type("Setup", (), {"samples": 4, "lengths": (2048,), "tasks": RIDDLES.tasks}), None).measured
    book = SimpleNamespace(model="m", target_length=2048, recipe={"source": [{}]})
    summary = summarise(SimpleNamespace(scores={"base": scores}, original_length=1024, book=book))
    assert summary.columns == ["", "riddles 2k"]
    assert summary.rows == [["original", "50.0%"]]
    assert summary.caption == "Riddles of the Sphinx: share of right answers by length"


def test_in_the_forecast_of_an_extension(tmp_path, monkeypatch, capsys):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('target_length = 512\nmethods = []\n[[evaluate]]\nsuites = ["riddles"]\nlengths = [512]\n')

    def step() -> dict:
        options = ["--config", recipe, "-o", tmp_path / "run", "--stages", "search,evaluate", "--dry-run", "--json"]
        steps = json.loads(command(monkeypatch, capsys, "extend", "tiny", *options))["steps"]
        return next(step for step in steps if step["step"] == "evaluate/base/riddles")

    known = step()
    assert known["disk_gib"] == pytest.approx(2000 * 1000 / 2**30)
    monkeypatch.setitem(SUITES, "riddles", replace(RIDDLES, samples=None))
    unknown = step()
    assert (known["note"], unknown["note"]) == ("", "without riddles")
    assert unknown["seconds"] < known["seconds"]


@pytest.mark.parametrize("name", [name for name in SUITES if name != "riddles"])
def test_every_suite_has_its_rows_in_the_docs(name):
    suite, page = SUITES[name], DOCS.read_text()
    assert f"| `{name}` | {suite.row} |\n" in page
    assert not suite.files or f"| `{name}` | {suite.files} |\n" in page
