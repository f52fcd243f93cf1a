"""Two models on the same questions: the interval of their difference, and how `compare` shows it."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from longrope2.errors import LongRopeError
from longrope2.evaluation.compare import compare, differences
from longrope2.evaluation.results import accuracy, perplexity
from longrope2.evaluation.table import PERCENT, POINTS
from longrope2.intervals import paired
from longrope2.perplexity import Score
from longrope2.records import Values, as_json


@pytest.mark.parametrize(("won", "lost", "count"), [(7, 0, 110), (11, 1, 110), (0, 0, 20), (3, 3, 10), (5, 0, 5)])
def test_right_and_wrong_have_the_interval_of_bonett_and_price(won, lost, count):
    one, other = (won + 1) / (count + 2), (lost + 1) / (count + 2)
    reach = 1.959963984540054 * math.sqrt((one + other - (one - other) ** 2) / (count + 2))
    expected = (max(-1, one - other - reach), min(1, one - other + reach))
    mean, *ends = paired([[1.0] * won + [-1.0] * lost + [0.0] * (count - won - lost)])
    assert mean == pytest.approx((won - lost) / count)
    assert ends == pytest.approx(expected)


def test_tasks_of_equal_size_count_as_one_and_each_counts_the_same():
    first, second = [1.0, 0.0, -0.5, 0.25], [0.0, 0.0, 1.0, 1.0]
    assert paired([first, second]) == pytest.approx(paired([first + second]))
    mean, low, high = paired([[1.0] * 10, [0.0] * 1000])
    assert mean == 0.5
    assert 0 < low < mean < high


@pytest.mark.parametrize("counts", [(110,), (20,) * 13, (40, 400)])
def test_the_interval_holds_the_truth_nineteen_times_of_twenty(counts):
    rng = np.random.default_rng(0)
    # Each sample is won, lost or drawn with its task's own odds; half of the tasks separate the models.
    odds = [(0.2, 0.05) if task % 2 == 0 else (0.1, 0.1) for task in range(len(counts))]
    truth = sum(won - lost for won, lost in odds) / len(counts)
    held = 0
    for _ in range(600):
        tasks = [
            rng.choice([1.0, -1.0, 0.0], size, p=[won, lost, 1 - won - lost])
            for size, (won, lost) in zip(counts, odds, strict=True)
        ]
        _, low, high = paired(tasks)
        held += low <= truth <= high
    assert 0.93 <= held / 600 <= 0.985


def values(*parts) -> dict:
    return {part.place: part.each for part in parts}


def ruler(task, scores, length=4096, asked="q"):
    return accuracy(scores, suite="ruler", task=task, length=length, metric="m", asked=asked)


def book(nlls, asked="b"):
    scores = [Score(nll, 10, exact=False) for nll in nlls]
    return perplexity(scores, suite="perplexity", task="full", length=4096, asked=asked)


def test_differences_by_task_average_and_perplexity():
    ours = values(ruler("vt", [1.0, 1.0, 0.5]), ruler("cwe", [0.0, 0.0, 1.0]), book([20.0, 22.0]))
    theirs = values(ruler("vt", [0.0, 1.0, 0.5]), ruler("cwe", [0.0, 0.0, 1.0]), book([21.0, 22.0]))
    vt, cwe, both, books = differences(ours, theirs)
    assert [(part.task, part.metric, part.samples) for part in (vt, cwe, both, books)] == [
        ("vt", POINTS, 3), ("cwe", POINTS, 3), ("average", POINTS, 6), ("full", PERCENT, 2),
    ]  # fmt: skip
    assert (vt.score, cwe.score, both.score) == pytest.approx((100 / 3, 0, 100 / 6))
    assert cwe.low < 0 < cwe.high  # not empty, though both answer alike
    assert books.score == pytest.approx(100 * (math.exp(-0.05) - 1))
    assert books.low < books.score < books.high


@pytest.mark.parametrize(
    "theirs",
    [
        values(ruler("vt", [1.0, 0.0], asked="others")),
        values(ruler("vt", [1.0, 0.0], length=8192)),
        values(ruler("cwe", [1.0, 0.0])),
        {"ruler/vt/4096": Values(asked="q", values=(1.0,))},
        {},
    ],
)
def test_other_questions_are_never_paired(theirs):
    assert differences(values(ruler("vt", [1.0, 0.0])), theirs) == []


def test_an_infinite_perplexity_has_no_difference():
    assert differences(values(book([math.inf, 1.0])), values(book([1.0, 1.0]))) == []


def test_an_interval_that_overflows_has_no_end():
    (books,) = differences(values(book([10.0, 1500.0])), values(book([10.0, 10.0])))
    assert books.score == pytest.approx(100 * math.expm1(74.5))
    assert (books.low, books.high) == (pytest.approx(-100), None)


def test_a_key_that_names_no_place_is_passed_over():
    odd = {"ruler": Values(asked="q", values=(1.0,))}
    assert differences(odd, odd) == []


def write_run(folder, name, parts, **changes) -> None:
    folder.mkdir(exist_ok=True)
    result = {
        "name": name, "model": "m", "factors": {}, "notes": [], "grids": {},
        "scores": [as_json(replace(part, each=None)) for part in parts], "values": as_json(values(*parts)), **changes,
    }  # fmt: skip
    (folder / "results.json").write_text(json.dumps(result))


def test_compare_against_a_row(tmp_path, capsys):
    write_run(tmp_path / "a", "yarn", [ruler("vt", [0.0] * 20), book([20.0] * 4)])
    write_run(tmp_path / "b", "ours", [ruler("vt", [1.0] * 10 + [0.0] * 10), book([19.0, 19.5, 19.2, 19.1])])
    write_run(tmp_path / "c", "other", [ruler("vt", [1.0] * 20, asked="others")])
    places = [tmp_path / name for name in "abc"]
    result = compare(places, against="yarn")
    apart, books = result.tables[-2:]
    assert apart.title == "RULER, against yarn"
    assert apart.rows == [["ours", "+50.0 (+21.1 to +69.8)"]]
    assert apart.caption == ("points more than yarn, question by question, with 95% intervals; samples in a number: 20")
    assert "other is not compared with yarn" in capsys.readouterr().err
    assert books.title == "Perplexity of books, full windows, against yarn"
    assert books.rows[0][1].startswith("-7.6")
    assert set(result.differences) == {"ours", "other"}
    assert result.differences["other"] == ()
    assert compare(places).differences == {}


def test_what_cannot_be_paired_is_said(tmp_path):
    write_run(tmp_path / "a", "yarn", [ruler("vt", [0.0])])
    write_run(tmp_path / "b", "ours", [ruler("vt", [1.0])], values={})
    places = [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(
        LongRopeError, match="no other row was asked the questions of yarn, or questions were not recorded"
    ):
        compare(places, against="yarn")
    with pytest.raises(LongRopeError, match="run 'yearn' is not known"):
        compare(places, against="yearn")
    write_run(tmp_path / "b", "ours", [ruler("vt", [1.0])], values={"ruler/vt/4096": {"asked": 1, "values": []}})
    with pytest.raises(
        LongRopeError, match=r"results.json: damaged: values\.ruler/vt/4096\.asked must be a valid string"
    ):
        compare(places)
    for place, wrong in (("ruler/vt/4096", 1e300), ("ruler/vt/4096", -1), ("perplexity/full/4096", 701.0)):
        found = {place: {"asked": "q", "values": [wrong]}}
        write_run(tmp_path / "b", "ours", [ruler("vt", [1.0])], values=found)
        with pytest.raises(LongRopeError, match=f"values.{place} must lie from 0 to "):
            compare(places)
    found = {"perplexity/full/4096": {"asked": "q", "values": [10**400]}}
    write_run(tmp_path / "b", "ours", [ruler("vt", [1.0])], values=found)
    with pytest.raises(LongRopeError, match=r"values.perplexity/full/4096.values.0 must be a finite number"):
        compare(places)


def test_rows_over_other_tasks_are_told_apart(tmp_path):
    write_run(tmp_path / "a", "yarn", [ruler("vt", [0.0]), ruler("cwe", [0.0])])
    write_run(tmp_path / "b", "one", [ruler("vt", [1.0])])
    write_run(tmp_path / "c", "two", [ruler("vt", [1.0]), ruler("cwe", [0.0])])
    table = compare([tmp_path / name for name in "abc"], against="yarn").tables[-1]
    assert "rows are not of the same tasks (one: vt; two: cwe, vt)" in table.caption


def test_perplexities_of_other_texts_are_told_apart(tmp_path):
    """The books of a length, and how far a window slides, depend on the longest length that was asked for."""
    for name, asked in (("a", "b"), ("b", "b"), ("c", "others")):
        write_run(tmp_path / name, name, [book([20.0] * 4, asked)])
    same, others = (compare([tmp_path / name for name in names], against="a") for names in ("ab", "abc"))
    assert same.tables[0].caption == "95% intervals; samples in a number: 4"
    assert others.tables[0].caption.endswith("; rows are not of the same texts at 4k")
    assert not any("texts" in table.caption for table in others.tables[1:])  # only what is the same is paired


def test_a_perplexity_without_a_name_is_shown(tmp_path):
    write_run(tmp_path / "a", "a", [replace(book([20.0] * 4), task="")])
    assert compare([tmp_path / "a"]).tables[0].rows[0][1].startswith("7.389")
