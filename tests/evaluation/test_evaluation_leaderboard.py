"""Leaderboards, on simulated rows whose truth is known, and on the rows in results/."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from scipy.stats import binomtest, false_discovery_control, ttest_1samp

from longrope2.cli import cli
from longrope2.errors import LongRopeError
from longrope2.evaluation.leaderboard import leaderboards
from longrope2.intervals import holm, paired, paired_p, rank_correlation, student, student_p

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "results" / "smollm2" / "rows"
BOARDS = ROOT / "results" / "leaderboard"
LENGTH = 8192
FACTORS = {"original_length": 2048, "target_length": LENGTH}


def write_row(folder, name, parts, *, seed=0, factors=FACTORS, asked="q", table=None) -> Path:
    """A row with these values by (suite, task, length)."""
    scores, values = [], {}
    for (suite, task, length), each in parts.items():
        is_perplexity = suite in ("perplexity", "longppl")
        score = math.exp(np.mean(each)) if is_perplexity else 100 * float(np.mean(each))
        metric = "perplexity" if is_perplexity else "m"
        entry = {"suite": suite, "task": task, "length": length, "metric": metric, "samples": len(each)}
        scores.append({**entry, "score": score, "low": score, "high": score})
        values[f"{suite}/{task}/{length}"] = {"asked": asked, "values": [float(value) for value in each]}
    row = {
        "name": name, "model": "m", "factors": factors, "notes": [], "grids": {}, "scores": scores, "values": values,
        "seed": seed, **({} if table is None else {"table": table}),
    }  # fmt: skip
    path = folder / f"{name}-{seed}.json"
    path.write_text(json.dumps(row))
    return path


def needles(values):
    return {("niah", "niah", LENGTH): values}


def answers(rng, chances):
    """Right or wrong to questions of which each has its own chance."""
    return (rng.random(len(chances)) < chances).astype(float)


def standings(record, title="Needle in a Haystack"):
    return {name: own[title] for name, own in record.boards[0].standings.items() if title in own}


def test_p_values_belong_to_their_intervals_and_agree_with_scipy():
    rng = np.random.default_rng(0)
    for _ in range(200):
        tasks = [rng.choice([1.0, 0.0, -1.0], size, p=[0.2, 0.7, 0.1]) for size in (30, 50)]
        _, low, high = paired(tasks)
        assert (paired_p(tasks) < 0.05) == (not low <= 0 <= high)
        values = rng.normal(0.3, 1, 12)
        low, high = student(values)
        assert (student_p(values) < 0.05) == (not low <= 0 <= high)
        assert student_p(values) == pytest.approx(ttest_1samp(values, 0).pvalue)
    # Never bolder than the exact test of won against lost, nor far from it.
    for won, lost in ((10, 0), (20, 0), (15, 3), (40, 20), (5, 5)):
        exact = binomtest(won, won + lost).pvalue
        assert exact <= paired_p([[1.0] * won + [-1.0] * lost + [0.0] * 160]) + 0.01 <= 3 * exact + 0.02
    assert student_p([1.0]) is None
    assert student_p([0.0, 0.0]) == 1
    assert student_p([0.5, 0.5]) == 0


def test_holms_correction_of_a_worked_example():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    p = list(np.random.default_rng(0).random(20))
    assert all(mine >= other for mine, other in zip(holm(p), false_discovery_control(p), strict=True))


def test_a_rank_correlation_needs_enough_that_differs():
    assert rank_correlation([1, 2, 3, 4], [1, 2, 3, 4]) is None
    assert rank_correlation([1, 1, 1, 1, 1], [1, 2, 3, 4, 5]) is None
    assert rank_correlation([1, 2, 3, 4, 5], [2, 3, 5, 7, 11])[0] == pytest.approx(1)


def test_equal_methods_are_told_apart_in_at_most_one_table_of_twenty(tmp_path):
    """Six methods with the same chances in every question: a best that is not tied with all is an error."""
    rng = np.random.default_rng(1)
    wrong_ties = wrong_against = 0
    tables = 120
    for _ in range(tables):
        chances = rng.beta(2, 1, 110)
        for name in "abcdef":
            write_row(tmp_path, name, needles(answers(rng, chances)))
        record = leaderboards([tmp_path], against="a")
        wrong_ties += any(s.tied is False and not s.best for s in standings(record).values())
        apart = record.boards[0].differences
        wrong_against += any(d.corrected_p < 0.05 for own in apart.values() for d in own.values())
    # 0.05 of 120 are 6; more than 12 would have a chance of 1 in 200 if the rate were 0.05.
    assert wrong_ties <= 12
    assert wrong_against <= 12


def test_without_holms_correction_equal_methods_would_be_told_apart(tmp_path, monkeypatch):
    """The simulation above can fail."""
    monkeypatch.setattr("longrope2.evaluation.leaderboard.holm", list)
    rng = np.random.default_rng(1)
    wrong = 0
    for _ in range(60):
        chances = rng.beta(2, 1, 110)
        for name in "abcdef":
            write_row(tmp_path, name, needles(answers(rng, chances)))
        wrong += any(s.tied is False and not s.best for s in standings(leaderboards([tmp_path])).values())
    assert wrong > 12


def test_a_method_that_is_better_is_found(tmp_path):
    """97% against 76% of 220 questions, the difference of evidence on SmolLM2, among four others at 88%."""
    rng = np.random.default_rng(2)
    found = 0
    for _ in range(20):
        for name, chance in {"ours": 0.97, "yarn": 0.76, "b": 0.88, "c": 0.88, "d": 0.88, "e": 0.88}.items():
            write_row(tmp_path, name, needles(answers(rng, np.full(220, chance))))
        record = leaderboards([tmp_path], against="yarn")
        ranked = standings(record)
        found += ranked["ours"].best and ranked["yarn"].tied is False
        assert record.boards[0].differences["ours"]["Needle in a Haystack"].corrected_p < 0.05
    assert found == 20


def test_the_better_of_two_perplexities_is_the_lower_one(tmp_path):
    rng = np.random.default_rng(3)
    books = rng.normal(3, 0.3, 20)
    for name, more in {"low": 0.0, "high": 0.05}.items():
        write_row(tmp_path, name, {("perplexity", "full", LENGTH): books + more + rng.normal(0, 0.01, 20)})
    record = leaderboards([tmp_path], against="high")
    ranked = standings(record, "Perplexity of books, full windows")
    assert (ranked["low"].best, ranked["high"].best, ranked["high"].tied) == (True, False, False)
    apart = record.boards[0].differences["low"]["Perplexity of books, full windows"]
    assert apart.low < 100 * math.expm1(-0.05) < apart.high
    assert apart.corrected_p < 1e-6


def test_seeds_are_one_line_with_their_spread(tmp_path):
    write_row(tmp_path, "ours", needles([1.0] * 9 + [0.0]))
    write_row(tmp_path, "ours", needles([1.0] * 7 + [0.0] * 3), seed=1)
    write_row(tmp_path, "yarn", needles([0.0] * 10))
    record = leaderboards([tmp_path])
    ours = standings(record)["ours"]
    assert ours.score == pytest.approx(80)
    assert ours.seeds == pytest.approx((90, 70))
    assert "| ours | **80.0 ±10.0** |" in record.markdown
    assert "±: half the range between seeds of training" in record.markdown
    write_row(tmp_path, "ours", needles([1.0] * 10), seed=1).rename(tmp_path / "again.json")
    write_row(tmp_path, "ours", needles([1.0] * 10), seed=1)
    with pytest.raises(LongRopeError, match="several rows named ours have the same seed"):
        leaderboards([tmp_path])


def test_rows_asked_for_other_things_are_marked_and_not_compared(tmp_path):
    write_row(tmp_path, "ours", needles([1.0] * 20))
    write_row(tmp_path, "other", needles([0.0] * 20), asked="others")
    record = leaderboards([tmp_path])
    assert standings(record)["other"].tied is None
    assert "| other | 0.0 † |" in record.markdown
    assert "†: not asked the questions of the best" in record.markdown


def test_a_table_for_each_leaderboard_and_length(tmp_path):
    """A method without some task has no average; tasks that the original cannot do are left out of a second one."""
    ruler = {("ruler", task, length): [1.0] * 10 for task in ("vt", "cwe") for length in (2048, LENGTH)}
    write_row(tmp_path, "original", ruler | {("ruler", "cwe", 2048): [0.0] * 10}, factors=None, table="t")
    write_row(tmp_path, "ours", ruler | {("short", "piqa", None): [1.0, 0.0]}, table="t")
    write_row(tmp_path, "half", {("ruler", "vt", LENGTH): [1.0] * 10}, table="t")
    write_row(tmp_path, "elsewhere", needles([1.0] * 10))
    record = leaderboards([tmp_path])
    assert [(board.table, board.length) for board in record.boards] == [("m, 8k", LENGTH), ("t", LENGTH), ("t", 2048)]
    longest, window = record.boards[1].standings, record.boards[2].standings
    assert list(longest["ours"]) == ["RULER", "RULER, 1 of 2 tasks", "PIQA"]
    assert list(longest["half"]) == ["RULER, 1 of 2 tasks"]
    assert list(window["original"]) == ["RULER", "RULER, 1 of 2 tasks"]
    assert window["original"]["RULER"].score == 50


def test_methods_stand_in_the_order_of_their_mean_ranks_after_the_original(tmp_path):
    perplexity = ("perplexity", "full", LENGTH)
    write_row(tmp_path, "a-worst", needles([0.0] * 10) | {perplexity: [3.0, 3.1]}, table="t")
    write_row(tmp_path, "b-unmeasured", {("niah", "niah", 2048): [1.0]}, table="t")
    write_row(tmp_path, "c-second", needles([0.0] * 5 + [1.0] * 5) | {perplexity: [2.0, 2.1]}, table="t")
    write_row(tmp_path, "d-best", needles([1.0] * 10) | {perplexity: [2.5, 2.6]}, table="t")
    write_row(tmp_path, "e-best-too", needles([1.0] * 10) | {perplexity: [2.4, 2.5]}, table="t")
    write_row(tmp_path, "original", needles([0.0] * 10) | {perplexity: [9.0, 9.1]}, factors=None, table="t")
    record = leaderboards([tmp_path], against="a-worst")
    order = ["original", "e-best-too", "c-second", "d-best", "a-worst", "b-unmeasured"]
    assert list(record.boards[0].standings) == order
    assert [row[0] for row in record.tables[0].rows] == order
    assert [row[0] for row in record.tables[1].rows] == order[:4]


def test_measures_are_ranked_against_ruler(tmp_path):
    rng = np.random.default_rng(4)
    for number in range(8):
        right = (np.arange(100) < 10 * number + 10).astype(float)
        parts = {("ruler", "vt", LENGTH): right, ("perplexity", "full", LENGTH): 3.0 - number / 10 + np.arange(5) / 100}
        parts[("niah", "niah", LENGTH)] = rng.permutation(right) if number % 2 else 1 - right
        write_row(tmp_path, f"m{number}", parts)
    write_row(tmp_path, "original", parts | needles([0.0] * 100), factors=None)
    found = leaderboards([tmp_path]).boards[0].correlations
    assert found["Perplexity of books, full windows"].spearman == pytest.approx(1)
    assert {entry.rows for entry in found.values()} == {8}
    assert abs(found["Needle in a Haystack"].spearman) < 0.6


@pytest.mark.parametrize("folder", sorted(BOARDS.iterdir()), ids=lambda folder: folder.name)
def test_the_published_tables_are_those_of_their_rows(folder):
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    for table in leaderboards([folder], against="YaRN").tables:
        assert table.markdown().strip() in page, table.title


def test_the_leaderboard_of_the_stored_rows(tmp_path):
    """The same numbers as in the rows' own files, and the same differences as `compare --against`."""
    result = CliRunner().invoke(
        cli, ["compare", "--leaderboard", str(ROWS), "--against", "YaRN", "-o", str(tmp_path), "--json"]
    )
    assert result.exit_code == 0, result.output
    boards = {(board["table"], board["length"]): board for board in json.loads(result.output)["boards"]}
    main = boards["main-32k", 32768]
    assert main["standings"]["LongRoPE2 (paper)"]["Needle in a Haystack"]["score"] == pytest.approx(107 / 1.1)
    assert main["standings"]["LongRoPE2 (paper)"]["Needle in a Haystack"]["best"]
    assert main["standings"]["YaRN"]["Needle in a Haystack"]["tied"]
    apart = main["differences"]["LongRoPE2 (paper)"]["Needle in a Haystack"]
    assert apart["p"] < 0.05 < apart["corrected_p"]
    assert main["retention"]["LongRoPE2 (paper)"] == pytest.approx(98.3, abs=0.05)
    assert (tmp_path / "leaderboard.md").read_text().startswith("**ablations-32k, measured at 32k**")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: no such file or folder"),
        (["."], "holds no rows"),
        ([str(ROWS), "--against", "Yarn"], "YaRN"),
        ([str(ROWS), "--base", "original"], "--base is not for --leaderboard"),
    ],
)
def test_what_is_refused(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LongRopeError, match=message):
        cli.main(["compare", "--leaderboard", *arguments], standalone_mode=False)
