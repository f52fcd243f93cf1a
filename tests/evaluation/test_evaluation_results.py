"""Intervals, tables, comparisons, and the command line around them."""

import json
import math
import os
import shutil
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from longrope2 import export_model as export
from longrope2 import models
from longrope2.cli import main
from longrope2.errors import LongRopeError, MissingExtraError
from longrope2.evaluation.compare import compare
from longrope2.evaluation.config import EvaluationConfig, lengths_for
from longrope2.evaluation.evaluate import _described
from longrope2.evaluation.results import accuracy, average, perplexity, with_averages
from longrope2.evaluation.suite import Prompt, TextSpan
from longrope2.evaluation.table import retention, run_tables
from longrope2.files import only_one
from longrope2.intervals import mean_of_means, student, wilson
from longrope2.methods import rescale
from longrope2.models import describe
from longrope2.perplexity import Score
from longrope2.records import Measured, Results, as_json
from longrope2.serving.settings import RESOLVED, SwitchSettings


def measured(suite, task, length, score, samples=20, **options) -> Measured:
    low, high = wilson(score / 100, samples)
    return Measured(
        suite=suite, task=task, length=length, metric="m", score=score, samples=samples,
        low=100 * low, high=100 * high, **options,
    )  # fmt: skip


# Intervals


@pytest.mark.parametrize(("right", "count"), [(0, 1), (0, 20), (5, 10), (19, 20), (20, 20), (333, 1000)])
def test_wilson_against_scipy(right, count):
    expected = stats.binomtest(right, count).proportion_ci(method="wilson")
    assert wilson(right / count, count) == pytest.approx((expected.low, expected.high), abs=1e-12)


@pytest.mark.parametrize("count", [110, 220, 260, 1300, 24, 65, 1000])
def test_rounding_leaves_no_mean_outside_its_interval(count):
    assert wilson(0.0, count)[0] == 0.0
    assert wilson(1.0, count)[1] == 1.0


def test_student_against_scipy():
    for count in (2, 4, 30):
        values = np.random.default_rng(count).normal(3, 2, count)
        expected = stats.t.interval(0.95, count - 1, loc=np.mean(values), scale=stats.sem(values))
        assert student(list(values)) == pytest.approx(expected, rel=1e-12)
    assert student([1.0]) is None


def test_an_average_over_equal_tasks_is_as_sure_as_all_their_scores():
    assert mean_of_means([0.5, 1.0], [20, 20]) == (0.75, 40)
    mean, count = mean_of_means([0.0, 1.0], [10, 90])
    assert (mean, count) == (0.5, pytest.approx(36))  # the small task decides
    # Few scores of a task that varies beside many of one that does not: sd 0.158 / 2 of the mean.
    mean, count = mean_of_means([0.5, 1.0], [10, 200])
    assert math.sqrt(mean * (1 - mean) / count) == pytest.approx(0.5 / math.sqrt(10) / 2, rel=0.05)
    both = average([measured("ruler", "a", 4096, 50.0), measured("ruler", "b", 4096, 100.0)])
    assert (both.score, both.samples, both.task) == (75.0, 40, "average")
    assert (both.low, both.high) == pytest.approx(tuple(100 * end for end in wilson(0.75, 40)))


@pytest.mark.parametrize("counts", [(100,), (20,) * 13, (20, 200)])
def test_the_interval_of_an_average_holds_the_truth_at_least_nineteen_times_of_twenty(counts):
    rng = np.random.default_rng(0)
    chances = [0.9 if task % 2 == 0 else 0.4 for task in range(len(counts))]
    held = 0
    for _ in range(600):
        means = [rng.binomial(size, chance) / size for size, chance in zip(counts, chances, strict=True)]
        low, high = wilson(*mean_of_means(means, counts))
        held += low <= sum(chances) / len(chances) <= high
    assert 0.93 <= held / 600 <= 1


def test_fractions_of_an_answer_vary_less_than_right_and_wrong():
    """So Wilson's interval is too wide for them, which is the safe side."""
    rng = np.random.default_rng(0)
    drawn = [rng.beta(2, 1, 50) for _ in range(600)]
    ends = [wilson(scores.mean(), len(scores)) for scores in drawn]
    assert sum(low <= 2 / 3 <= high for low, high in ends) / 600 > 0.99
    assert all(
        high - low > np.subtract(*student(scores)[::-1]) for scores, (low, high) in zip(drawn, ends, strict=True)
    )


def test_accuracy_and_perplexity():
    found = accuracy([1.0, 0.5, 0.0, 1.0], suite="s", task="t", length=8, metric="m", asked="x")
    assert (found.score, found.samples) == (62.5, 4)
    assert (found.low, found.high) == pytest.approx(tuple(100 * end for end in wilson(0.625, 4)))
    scores = [Score(2.0, 2, exact=False), Score(9.0, 3, exact=False)]
    book = perplexity(scores, suite="s", task="t", length=8, asked="x")
    assert book.score == pytest.approx(math.exp(11 / 5))  # each token counts the same
    assert book.low < book.score < book.high
    assert perplexity(scores[:1], suite="s", task="t", length=8, asked="x").low is None
    assert perplexity([Score(math.inf, 1, exact=False)], suite="s", task="t", length=8, asked="x").score is None


ROWS = Path(__file__).parents[2] / "results/smollm2/rows"


def test_stored_results_have_the_intervals_that_their_values_give():
    """Of the SmolLM2 comparison, measured on a GPU by an earlier release; its values are rounded."""
    checked = 0
    for path in sorted(ROWS.glob("*.json")):
        run = Results.load(path)
        stored = {score.place: score for score in run.scores}
        for place, found in run.values.items():
            score = stored[place]
            if score.metric == "perplexity":
                ends = np.exp(student(found.values))
            else:
                ends = 100 * np.array(wilson(np.mean(found.values), len(found.values)))
            assert ends == pytest.approx((score.low, score.high), rel=1e-5, abs=1e-5), (path.name, place)
            checked += 1
    assert checked > 400


def test_stored_results_are_compared_as_they_were(tmp_path):
    """The published comparison comes out of files that have no format yet."""
    kept = json.loads((ROWS.parent / "main-32k.json").read_text())
    names = [Path(run["folder"]).name for run in kept["runs"]]
    again = as_json(compare([ROWS / name for name in names], against=kept["against"]))
    assert again["tables"] == kept["tables"]
    assert again["markdown"] == kept["markdown"]
    assert again["scores"] == kept["scores"]
    assert again["grids"] == kept["grids"]


def test_averages_follow_their_length():
    parts = [measured("ruler", task, length, 50.0) for length in (8192, 4096) for task in ("vt", "cwe")]
    tasks = [(part.length, part.task) for part in with_averages(parts)]
    assert tasks == [
        (8192, "vt"), (8192, "cwe"), (8192, "average"), (4096, "vt"), (4096, "cwe"), (4096, "average"),
    ]  # fmt: skip
    assert with_averages(parts[:1]) == parts[:1]


# Tables


def test_tasks_are_rows_and_lengths_columns():
    parts = [measured("ruler", task, length, 50.0) for length in (8192, 4096) for task in ("vt", "cwe")]
    parts = [*with_averages(parts), measured("short", "mmlu", None, 30.0, 114)]
    ruler, short = run_tables("mine", parts)
    assert ruler.title == "mine: RULER"
    assert ruler.columns == ["task", "samples", "4k", "8k"]
    assert [row[:2] for row in ruler.rows] == [["vt", "20"], ["cwe", "20"], ["Avg.", "40"]]
    assert ruler.rows[0][2] == "50.0 (29.9–70.1)"
    assert short.columns == ["task", "samples", "score"]
    assert short.rows == [["MMLU", "114", "30.0 (22.4–39.0)"]]
    assert ruler.markdown().splitlines()[2:4] == ["| task | samples | 4k | 8k |", "| --- | ---: | ---: | ---: |"]


# Comparisons


def write_run(folder, name, scores, *, factors=None, grids=None, notes=()) -> None:
    folder.mkdir()
    result = {
        "name": name, "model": "m", "factors": factors, "notes": list(notes), "grids": grids or {},
        "scores": as_json(scores),
    }  # fmt: skip
    (folder / "results.json").write_text(json.dumps(result))


HEAVY = ["torch", "transformers", "tokenizers", "scipy", "matplotlib", "lm_eval", "datasets", "pandas", "nltk"]
READING = f"""
import sys, time
sys.argv = ["longrope2", "compare", *sys.argv[1:]]
from longrope2.cli import main
try:
    main()
finally:
    print(time.process_time(), *set({HEAVY!r}) & set(sys.modules), file=sys.stderr)
"""


def test_comparing_starts_at_once(tmp_path):
    """Under half a second of one core where nothing else runs, and here, where tests do, under a whole one."""
    for name in "ab":
        scores = [measured("ruler", "vt", 4096, 50.0), measured("perplexity", "full", 4096, 9.0)]
        write_run(tmp_path / name, name, scores, notes=["n"])
    least = math.inf
    for _ in range(3):
        command = [sys.executable, "-c", READING, str(tmp_path / "a"), str(tmp_path / "b")]
        result = subprocess.run(command, check=True, capture_output=True, text=True)
        assert "Perplexity of books" in result.stdout
        seconds, *heavy = result.stderr.split()
        assert heavy == []
        least = min(least, float(seconds))
    assert least < 1


@pytest.fixture
def runs(tmp_path):
    grid = {
        "lengths": [4096, 8192],
        "depths": [0.0, 1.0],
        "cells": [[{"score": 100.0, "samples": 10, "low": 72.2, "high": 100.0}] * 2] * 2,
    }
    base = [measured("short", "mmlu", None, 60.0, 100), measured("short", "gsm8k", None, 40.0, 50)]
    write_run(tmp_path / "base", "original", [*base, average(base)])
    for name, score in (("yarn", 50.0), ("longrope2", 80.0)):
        ruler = [measured("ruler", task, length, score) for length in (4096, 8192) for task in ("vt", "cwe")]
        short = [measured("short", "mmlu", None, 54.0, 100), measured("short", "gsm8k", None, 36.0, 50)]
        scores = [*with_averages(ruler), measured("niah", "niah", 8192, 90.0, 110), *short, average(short)]
        write_run(tmp_path / name, name, scores, factors={"method": name}, grids={"niah": grid}, notes=["without qa_1"])
    return [tmp_path / name for name in ("base", "yarn", "longrope2")]


def test_methods_are_rows(runs):
    result = compare(runs)
    tables = {table.title: table for table in result.tables}
    assert tables["RULER"].columns == ["Method", "4k", "8k"]
    assert [row[0] for row in tables["RULER"].rows] == ["yarn", "longrope2"]
    assert tables["RULER"].rows[1][1].startswith("80.0 (")
    assert tables["Needle in a Haystack"].columns == ["Method", "8k"]
    assert tables["Short tasks"].columns == ["Method", "Avg.", "MMLU", "GSM8K", "Retention"]
    assert [row[-1] for row in tables["Short tasks"].rows] == ["100.0%", "90.0%", "90.0%"]
    assert result.base == "original"
    assert "- yarn: without qa_1" in result.markdown
    assert "samples in a number: 40" in result.markdown


def test_a_row_may_be_named_anew(runs, tmp_path):
    twice = [f"first={runs[1]}", f"second={runs[1] / 'results.json'}", runs[1]]
    assert [row.name for row in compare(twice).runs] == ["first", "second", "yarn"]
    assert [row.folder for row in compare(twice).runs] == [str(runs[1]), f"{runs[1]}/results.json", str(runs[1])]
    odd = runs[1].rename(tmp_path / "a=b")
    assert [row.name for row in compare([odd, f"x={odd}"]).runs] == ["yarn", "x"]


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (("vt", "cwe"), ("vt", "cwe", "fwe"), "one: cwe, vt; other: cwe, fwe, vt"),
        (("vt",), ("vt", "cwe"), "one: vt; other: cwe, vt"),  # a task beside an average
        (("vt",), ("cwe",), "one: vt; other: cwe"),
        (("vt", "cwe"), ("vt", "fwe"), "one: cwe, vt; other: fwe, vt"),
        (("vt", "cwe", "fwe", "qa_1"), ("vt",), "one: 4 tasks; other: vt"),
    ],
)
def test_rows_of_other_tasks_are_told_apart(one, other, told, tmp_path):
    for name, tasks in (("one", one), ("other", other)):
        write_run(tmp_path / name, name, with_averages(measured("ruler", task, 4096, 50.0) for task in tasks))
    result = compare([tmp_path / "one", tmp_path / "other"])
    assert f"rows are not of the same tasks ({told})" in result.markdown
    assert result.base is None  # two originals: neither is the one


def test_retention_is_on_common_tasks():
    by_name = {
        "base": [measured("short", "a", None, 50.0), measured("short", "b", None, 10.0)],
        "other": [measured("short", "a", None, 45.0), measured("short", "c", None, 99.0)],
    }
    assert retention(by_name, "base") == {"base": 100.0, "other": 90.0}
    assert retention(by_name, None) == {}
    nothing = {"base": [measured("short", "a", None, 0.0)], "other": by_name["other"]}
    assert retention(nothing, "base") == {}


def command(monkeypatch, capsys, *arguments) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["longrope2", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    output = capsys.readouterr()
    return ended.value.code or 0, output.out, output.err


def test_compare_writes_markdown_json_and_figures(runs, tmp_path, monkeypatch, capsys):
    code, out, _ = command(monkeypatch, capsys, "compare", *runs, "-o", tmp_path / "out")
    assert code == 0
    assert "Retention" in out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "compare.md",
        "compare.json",
        "ruler.png",
        "niah.png",
    }
    assert json.loads((tmp_path / "out" / "compare.json").read_text())["retention"]["yarn"] == pytest.approx(90.0)
    code, out, _ = command(monkeypatch, capsys, "compare", *runs, "--json", "--base", "yarn")
    assert json.loads(out)["retention"]["original"] == pytest.approx(1000 / 9)


def test_a_name_is_no_formula(runs, tmp_path, monkeypatch, capsys):
    code, out, _ = command(monkeypatch, capsys, "compare", f"$_$={runs[1]}", "-o", tmp_path / "out")
    assert (code, "$_$" in out, len(list((tmp_path / "out").glob("*.png")))) == (0, True, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "results.json: cannot be read"),
        (["yarn", "yarn"], "several evaluations are named yarn\nhint: give each its own: longrope2 compare NAME="),
        (["yarn", "--base", "origin"], "run 'origin' is not known"),
        (["broken"], "results.json: damaged: 6 problems\n  - name is missing\n  - model is missing"),
    ],
)
def test_wrong_comparisons(arguments, message, runs, monkeypatch, capsys):
    folder = runs[0].parent
    (folder / "broken").mkdir()
    (folder / "broken" / "results.json").write_text("{}")
    (folder / "nowhere").mkdir()
    monkeypatch.chdir(folder)
    code, out, error = command(monkeypatch, capsys, "compare", *arguments)
    assert (code, out) == (2, "")
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scores", 5), ("scores", [{}]), ("scores", [3]), ("notes", None), ("notes", [1]), ("name", 7), ("factors", 1),
        ("grids", {"niah": {"lengths": [4096], "depths": [0.0], "cells": [[]]}}),
        ("grids", {"niah": {"lengths": [], "depths": [], "cells": []}}),
        ("grids", {"niah": {"lengths": [], "depths": [0.0], "cells": [[]]}}),
        ("scores", [{**as_json(measured("niah", "niah", None, 1.0))}]),
        ("scores", [as_json(measured("niah", "niah", 4096, math.nan))]),
        ("scores", [{**as_json(measured("niah", "niah", 4096, 1.0)), "high": math.inf}]),
        ("scores", [{**as_json(measured("short", "mmlu", None, 1.0)), "score": None}]),
    ],
)  # fmt: skip
def test_results_of_another_shape_are_refused(key, value, runs, monkeypatch, capsys):
    file = runs[1] / "results.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    code, _, error = command(monkeypatch, capsys, "compare", *runs)
    assert code == 2
    assert error.startswith(f"error: {file}: damaged: ")


def test_what_is_left_out_and_what_is_written_is_told(tmp_path, monkeypatch, capsys):
    scores = [measured("passkey", "passkey", 4096, 50.0), measured("newer", "t", 4096, 50.0)]
    write_run(tmp_path / "run", "a|b", scores)
    code, _, error = command(monkeypatch, capsys, "compare", tmp_path / "run", "-o", tmp_path / "out")
    assert code == 0
    assert "left out, since this release has no such suite: newer" in error
    assert f"wrote compare.md, compare.json into {tmp_path / 'out'}" in error
    rows = [line for line in (tmp_path / "out" / "compare.md").read_text().splitlines() if line.startswith("|")]
    assert rows[2].startswith("| a\\|b | 50.0")


# Evaluations that are refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--suite", "rulr"], "suite 'rulr' is not known\nhint: did you mean 'ruler'?"),
        (["--suite", "ruler", "--tasks", "niah_singl_1"], "did you mean 'niah_single_1'?"),
        (["--suite", "niah", "--lengths", "1k"], "length 1,024 is beyond the model's window of 256 tokens"),
        (["--suite", "short", "--data", "nowhere"], "nowhere: no such folder"),
        (["--suite", "niah", "--samples", "0"], "samples must be at least 1, got 0"),
        (["--suite", ","], "no suite is named"),
        (["--suite", "ruler", "--seed", "4294967296"], "seed must lie from 0 to 4294967295, got 4294967296"),
        (["--suite", "longbench"], "longbench needs its data files\nhint: triviaqa.jsonl is in data.zip"),
        (["--suite", "niah", "--switch-length", "64"], "--switch-length needs a model with two sides"),
        (
            ["--suite", "niah", "--backend", "vllm", "--switch-length", "64"],
            "--backend vllm takes a saved model as it is",
        ),
        (
            ["--suite", "niah,perplexity,short", "--backend", "vllm", "--beyond-window"],
            "--backend vllm cannot run suite perplexity and suite short and --beyond-window",
        ),
        (["--suite", "niah", "--samples", "373"], "samples must be at most 372 for niah, got 373\nhint: see"),
        (["--suite", "niah", "--chat"], "the tokenizer has no chat template"),
        (["--suite", "niah", "--books", "nosuch"], "'nosuch' is neither a file or folder"),
        (["--suite", "niah", "-o", "taken"], "taken is a file, a folder is needed\nhint: name a folder"),
        (["--suite", "niah", "-o", "searched"], "searched: neither empty nor a run of `longrope2 evaluate`"),
        (["--suite", "niah", "-o", "odd"], "odd/results.json: cannot be written (Is a directory)\nhint: give another"),
        (["--suite", "perplexity,niah", "--lengths", "256,127"], "of 127 tokens has no room"),
        (["--suite", "perplexity,passkey", "--lengths", "256,128"], "has no room for its sentences and the answer"),
        (["--suite", "ruler", "--lengths", "256,64"], "niah_single_1: a length of 64 tokens, and its answer alone may"),
        (["--suite", "ruler", "--tasks", "vt"], "vt at 256 tokens: a sample takes at least 883 tokens"),
        (["--suite", "ruler", "--tasks", "qa_1"], "nothing of RULER can be run: qa_1 needs SQuAD 2.0's dev-v2.0.json"),
        (["--suite", "perplexity", "--lengths", "256,1"], "perplexity needs at least 2 tokens"),
        (["--suite", "perplexity", "--books", "short.txt"], "no book is long enough: 256 tokens needed"),
        (["--suite", "niah", "--books", "short.txt", "--lengths", "256"], "no book is long enough: 240 tokens needed"),
        (["--suite", "infinitebench", "--tasks", "kv_retrieval", "--lengths", "99"], "and its answer do not fit"),
        (["--suite", "longbench", "--tasks", "lcc", "--lengths", "65", "--data", "."], "1 tokens have no room for a"),
        (["--suite", "loft", "--tasks", "nq", "--data", "."], "LOFT has corpora of 32k, 128k, 1m tokens, none of 256"),
        (["--suite", "niah", "--factors", "other.json"], "made for another model than tiny"),
    ],
)
def test_wrong_evaluations_are_one_message(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("weights were loaded"))
    (tmp_path / "taken").touch()
    (tmp_path / "odd" / "results.json").mkdir(parents=True)
    (tmp_path / "searched").mkdir()
    (tmp_path / "searched" / "history.jsonl").touch()
    (tmp_path / "nq").mkdir()
    (tmp_path / "short.txt").write_text("A book of few words.")
    row = {"input": "", "context": "x = 1\n", "answers": ["y"], "all_classes": None}
    (tmp_path / "lcc.jsonl").write_text(json.dumps(row))
    rope = replace(describe("tiny").rope, theta=1234.0)
    rescale("pi", rope, 1024).save(tmp_path / "other.json")
    code, out, error = command(monkeypatch, capsys, "evaluate", "tiny", "-o", "out", *options)
    assert (code, out) == (2, "")
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize("one_rope", [True, False])
def test_a_folder_is_called_by_the_method_of_its_factors(tmp_path, one_rope):
    """Its config says longrope of all of them; factors.json beside it says which, if it is about the same RoPE."""
    factors = rescale("yarn", describe("tiny").rope, 1024)
    export("tiny", tmp_path / "e", factors=factors.long_everywhere() if one_rope else factors)
    described = _described(describe(tmp_path / "e"), None)
    assert described == {"method": "yarn", "original_length": 256, "target_length": 1024, "critical_dimension": None}
    rescale("ntk", describe("tiny").rope, 1024).save(tmp_path / "e" / "factors.json")
    assert _described(describe(tmp_path / "e"), None)["method"] == "longrope"


def test_a_rescaled_model_is_not_given_another_trained_window(tmp_path, monkeypatch, capsys):
    """It would run as its config says all the same; the length that is there may be said again."""
    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("weights were loaded"))
    export("tiny", tmp_path / "e", factors=rescale("yarn", describe("tiny").rope, 1024))
    ask = ["evaluate", tmp_path / "e", "--suite", "niah", "-o", tmp_path / "out", "--original-length"]
    code, _, error = command(monkeypatch, capsys, *ask, "128")
    assert code == 2
    assert "e runs as its config says, with a trained window of 256 tokens, not 128\nhint: leave --original" in error
    with pytest.raises(pytest.fail.Exception, match="weights were loaded"):
        command(monkeypatch, capsys, *ask, "256")


def test_one_evaluation_at_a_time_in_a_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("weights were loaded"))
    with only_one(tmp_path, "", hint=""):
        code, _, error = command(monkeypatch, capsys, "evaluate", "tiny", "--suite", "niah", "-o", tmp_path)
    assert code == 2
    assert f"{tmp_path}: another process is evaluating there" in error


def test_a_model_that_cannot_be_loaded_leaves_no_folder(tmp_path, monkeypatch, capsys):
    shutil.copytree(models.ASSETS / "tiny", tmp_path / "cut")
    os.truncate(tmp_path / "cut" / "model.safetensors", 1 << 20)
    code, _, error = command(monkeypatch, capsys, "evaluate", tmp_path / "cut", "--suite", "niah", "-o", tmp_path / "o")
    assert code == 2
    assert "its weights cannot be loaded" in error
    assert not (tmp_path / "o").exists()


def test_lengths_up_to_the_window():
    config = EvaluationConfig(suites=("niah",))
    assert lengths_for(config, 1 << 14) == (16_384, 8192, 4096)
    assert lengths_for(config, 300) == (300,)
    asked = EvaluationConfig(suites=("niah",), lengths=(64, 128, 64), beyond_window=True)
    assert lengths_for(asked, 100) == (128, 64)


def test_tasks_belong_to_their_suites():
    config = EvaluationConfig(suites=("ruler", "niah"), tasks=("vt", "cwe"))
    assert config.tasks_of("ruler") == ("vt", "cwe")
    assert config.tasks_of("niah") == ("niah",)
    config = EvaluationConfig(suites=("ruler", "short"), tasks=("vt", "arc_easy"))
    assert config.tasks_of("short") == ("arc_easy",)
    with pytest.raises(LongRopeError, match="task 'arc_easy' is not known"):
        EvaluationConfig(suites=("ruler",), tasks=("arc_easy",))


# vLLM


def test_vllm_is_asked_as_it_wants(monkeypatch):
    from longrope2.evaluation.backend import VllmBackend

    asked, noted = {}, {}

    class Engine:
        def __init__(self, **options):
            asked["engine"] = options
            self.llm_engine = types.SimpleNamespace(vllm_config=types.SimpleNamespace(additional_config=noted))

        def generate(self, prompts, parameters, *, use_tqdm):
            asked["prompts"], asked["parameters"] = prompts, parameters
            return [types.SimpleNamespace(outputs=[types.SimpleNamespace(text="yes; no")]) for _ in prompts]

    fake = types.SimpleNamespace(LLM=Engine, SamplingParams=lambda **options: options)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    backend = VllmBackend(describe("tiny"), None, window=256)
    assert backend.answer([Prompt(token_ids=(1, 2), max_new_tokens=3, stop=(";",))]) == ["yes"]
    assert asked["engine"]["max_model_len"] == 256
    assert asked["engine"]["trust_remote_code"] is False
    assert backend.switch_length is None
    noted[RESOLVED] = SwitchSettings(switch_length=100, original_length=128).to_json()
    other = VllmBackend(replace(describe("tiny"), location="owner/name@v1"), None, window=256)
    assert other.switch_length == 100
    assert (asked["engine"]["model"], asked["engine"]["revision"]) == ("owner/name", "v1")
    assert asked["prompts"] == [{"prompt_token_ids": [1, 2]}]
    assert asked["parameters"] == [{"temperature": 0.0, "max_tokens": 3, "stop": [";"]}]
    with pytest.raises(LongRopeError, match="do not run on vLLM"):
        backend.score([TextSpan(token_ids=[1, 2], start=1)])


def test_a_vllm_that_does_not_start_gives_one_message(monkeypatch):
    from longrope2.evaluation.backend import VllmBackend

    def fail(**_):
        raise RuntimeError("Engine core initialization failed.\nSee root cause above.")

    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(LLM=fail))
    with pytest.raises(LongRopeError, match=r"does not start with tiny .Engine core .* failed. See root") as caught:
        VllmBackend(describe("tiny"), None, window=256)
    assert "--backend torch" in caught.value.hint


def test_without_vllm_the_pip_command_is_named(monkeypatch):
    from longrope2.evaluation.backend import VllmBackend

    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingExtraError) as caught:
        VllmBackend(describe("tiny"), None, window=256)
    assert caught.value.hint == "pip install 'longrope2[vllm]'"
