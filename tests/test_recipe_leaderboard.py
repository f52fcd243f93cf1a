"""The leaderboard recipe: its rows as far as they can be tried without their models, and all of it on the tiny one."""

import importlib.util
import json
import re
import subprocess
import sys
import threading
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import longrope2
from longrope2.books import read_books
from longrope2.data.config import read_mix
from longrope2.errors import LongRopeError
from longrope2.evaluation.compare import compare
from longrope2.evaluation.config import EvaluationConfig
from longrope2.evaluation.leaderboard import leaderboards
from longrope2.evaluation.results import accuracy
from longrope2.methods import rescale
from longrope2.models import weights_fingerprint
from longrope2.records import EvaluationRecord
from longrope2.rope import RopeSpec
from longrope2.search.config import search_config
from longrope2.training.config import train_config

RECIPE = Path(__file__).parent.parent / "recipes" / "leaderboard"
K = 1024


@pytest.fixture(scope="module")
def recipe():
    """run.py, which imports rows.py beside it."""
    sys.path.insert(0, str(RECIPE))
    spec = importlib.util.spec_from_file_location("leaderboard_run", RECIPE / "run.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["leaderboard_run"] = module
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(RECIPE))
    del sys.modules["leaderboard_run"], sys.modules["rows"]


@pytest.fixture
def rows(recipe):
    return sys.modules["rows"]


@pytest.fixture
def bench(recipe, tmp_path):
    made = recipe.Bench(family=recipe.BASES["smollm2"], model="m", data=tmp_path, output=tmp_path)
    made.__dict__["base"] = "m"
    return made


def all_rows(recipe):
    return [(base, base.row(name)) for base in recipe.BASES.values() for name in base.names]


def test_every_row_asks_for_evaluations_that_exist(recipe):
    for _, row in all_rows(recipe):
        for name in row.evaluations:
            config = EvaluationConfig(**recipe.evaluation(name, row))
            assert all(length <= row.length for length in config.lengths)


def test_ruler_has_the_tasks_that_fit(recipe):
    def asked(base, name):
        return recipe.evaluation("ruler", recipe.BASES[base].row(name))["tasks"]

    assert asked("smollm2", "yarn@32k") == ()
    short = asked("tinyllama", "yarn@32k")  # at 2k, too, where a question of HotpotQA has no room
    assert set(recipe.RULER_TASKS) - set(short) == {"qa_2"}
    assert len(asked("qwen", "yarn@128k")) == 5
    assert "needles" not in recipe.BASES["qwen"].row("yarn@128k").evaluations


def test_less_is_asked_at_128k(recipe):
    smollm2 = recipe.BASES["smollm2"]
    far, near, original = (smollm2.row(name) for name in ("yarn@128k", "yarn@32k", "original@128k"))
    for name in ("multikey", "multivalue"):
        samples = {row.length: recipe.evaluation(name, row)["samples"] for row in (far, near)}
        assert samples == {128 * K: 5, 32 * K: 10}
    assert recipe.evaluation("wordings", far)["lengths"] == (8 * K, 32 * K, 128 * K)
    assert recipe.evaluation("wordings", original)["lengths"] == (8 * K,)
    assert recipe.evaluation("wordings", smollm2.row("original@32k"))["lengths"] == (4 * K, 8 * K)
    assert recipe.evaluation("wordings", recipe.BASES["tiny"].row("original@2k"))["lengths"] == (256, 2 * K)


def test_every_row_has_a_mix_of_its_length_with_enough_rows(recipe, tmp_path):
    for base, row in all_rows(recipe):
        if row.make is None:
            continue
        mix = base.mix(row)
        (tmp_path / "mix.toml").write_text(mix.text())
        settings = read_mix(tmp_path / "mix.toml")
        assert settings["target_length"] == settings["buckets"][-1].up_to == mix.target
        assert mix.target == (base.window if "DroPE" in row.title else row.length)
        assert {source.path for source in settings["sources"]} == {"books", *mix.recall}
        assert settings["rows"] >= row.steps * row.rows_of_step
        assert settings.get("original_length", base.window) == base.window


def test_the_mixes_of_stored_rows_are_what_they_were(rows):
    """In words of their own, so that plans made from them stay the same."""
    for target, count in ((32 * K, 640), (64 * K, 160)):
        mix = rows.MIXES[f"mix-{target // K}k"]
        found = tomllib.loads(mix.text())
        assert found["plan"] == {"original_length": 8192, "target_length": target, "rows": count, "repeat": True}
        books, short, long = found["source"]
        assert books["cut"] == [8189, 4000, 8189, 2000, target - 3, 8189, target - 3]
        assert books["buckets"] == ["short", "long"]
        assert [short["path"], long["path"]] == ["recall-8k", f"recall-{target // K}k"]
        sizes = {bucket["name"]: (bucket["up_to"], bucket["quota"]) for bucket in found["bucket"]}
        assert sizes == {
            "short": (8191, 4), "recall-8k": (8192, 2), "long": (target - 1, 4), long["path"]: (target, 10),
        }  # fmt: skip
        assert mix.recall == {"recall-8k": (8192, 256, 32), long["path"]: (target, count // 2, target // 256)}
    switched = rows.Mix(window=192, target=2 * K, rows=240)  # a calibrated switch within the tiny model's window
    assert switched.recall[switched.short_recall][2] == 1


def test_every_row_can_be_trained_with_its_options(recipe, rows):
    for _, row in all_rows(recipe):
        train_config(window=row.window, **row.training).check()
    own = rows.SMOLLM2_ROWS
    assert own["lora-also"].training == {**own["lora"].training, "also": ("norms", "embeddings")}


def test_a_row_of_a_leaderboard_from_its_name(recipe, rows):
    smollm2 = recipe.BASES["smollm2"]
    row = smollm2.row("yarn@32k-seed1")
    assert (row.title, row.table, row.window, row.length, row.seed) == (
        "YaRN", "SmolLM2-135M-Instruct, 32k", "single", 32 * K, 1,
    )  # fmt: skip
    assert smollm2.mix(row) == rows.MIXES["mix-32k"]  # the rows of those with names of their own
    assert row.lengths[: row.lengths.index(32 * K) + 1] == (4 * K, 8 * K, 16 * K, 32 * K)
    assert row.peer("paper") == "paper@32k"
    drope = smollm2.row("drope@32k")
    assert drope.rows_of_step * smollm2.mix(drope).target == row.rows_of_step * row.length
    assert smollm2.row("original@32k").steps == 0
    for name, message in {
        "yarm@32k": "yarn", "yarn@16k": "not extended to 16k", "yarn-32k": "is no row", "yarn@32k-1": "is no row",
    }.items():  # fmt: skip
        with pytest.raises(LongRopeError, match=message):
            smollm2.row(name)


def test_sources_of_a_mix_are_made_and_put_in_place(recipe, rows, tmp_path, monkeypatch):
    """With documents of a size that fits the tiny model's books."""
    data = tmp_path / 'my "data"'
    books = data / "books" / "train"
    books.mkdir(parents=True)
    (books / "a.txt").write_text(next(iter(read_books())).text, encoding="utf-8")
    mix = rows.MIXES["mix-32k"]
    monkeypatch.setattr(rows.Mix, "recall", dict.fromkeys(mix.recall, (512, 3, 2)))
    planned = []
    monkeypatch.setattr(
        recipe, "plan_documents", lambda model, path, *, config, seed, cache: planned.append((config, seed))
    )
    bench = recipe.Bench(family=recipe.BASES["smollm2"], model="tiny", data=data, output=tmp_path / "out")
    (tmp_path / "out").mkdir()
    bench.plan(mix, "mix-32k", 1, "tiny")
    config, seed = planned[0]
    assert seed == 1
    sources = read_mix(config)["sources"]
    assert [source.path for source in sources] == [str(books), *(f"{tmp_path}/out/recall-{n}k.jsonl" for n in (8, 32))]
    assert len((tmp_path / "out" / "recall-32k.jsonl").read_text().splitlines()) == 3


def test_without_data_nothing_is_measured_on_books_that_are_trained_on(recipe, tmp_path):
    bench = recipe.Bench(family=recipe.BASES["tiny"], model="tiny", data=None, output=tmp_path / "out")
    mix = bench.family.mix(bench.family.row("yarn@2k"))
    trained = bench.source("books", mix, "tiny")
    assert bench.books("search") == trained
    assert bench.books("validation") is None  # which are the held-out ones for every suite
    texts = {path.read_text(encoding="utf-8") for path in Path(trained).iterdir()}
    assert texts == {book.text for book in read_books(held_out=False)}


def test_searches_are_ones_that_can_be_made(rows, bench, monkeypatch):
    made, warm = [], replace(longrope2.rescale("tiny", "yarn", 1024), long_attention_factor=1.2)
    monkeypatch.setattr(rows, "search_factors", lambda model, length, folder, **options: made.append(options) or warm)
    bench.family = replace(bench.family, kept={})
    names = ("longrope", "paper", "wide", "plain", "all", "paper-64k", "wide-64k", "longrope@128k", "wide@128k")
    for name in (*names, "released@32k"):
        row = bench.family.row(name)
        assert row.make(bench, row, Path("f")).long_attention_factor == 1.2
        assert made[-1] == {"books": str(bench.data / "books" / "search"), **rows.SEARCH, **row.make.needs["search"]}
        assert search_config(target_length=row.length, **made[-1]).problems() == []
    cold = bench.family.row("released-cold@32k")
    assert cold.make(bench, cold, Path("f")).long_attention_factor == 1.0
    assert made[-1]["attention_factor"] == "released"


def test_a_row_is_what_its_folder_holds(recipe, bench, tmp_path, monkeypatch):
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
    spec = importlib.util.spec_from_file_location("ranks", RECIPE / "ranks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def smollm2_rope(rows, monkeypatch):
    """The RoPE of SmolLM2 in the place of the model."""
    spec = RopeSpec(rotary_dim=64, theta=1e5, original_length=8 * K)
    monkeypatch.setattr(
        rows, "rescale", lambda model, method, length, **options: rescale(method, spec, length, **options)
    )
    return spec


def test_factors_to_rank_are_those_that_results_hold(rows, bench, smollm2_rope, tmp_path):
    own = rows.SMOLLM2_ROWS
    tables = ("ranks-32k", "brief-32k")
    made = {name: row.make(bench, row, tmp_path) for name, row in own.items() if row.table in tables}
    brief = {name: factors for name, factors in made.items() if name.startswith("brief-")}
    assert len(brief) == 17
    assert made["set-wide-0"].long_attention_factor > 1.1
    assert made["set-wide-0-cold"] == replace(made["set-wide-0"], long_attention_factor=1.0)
    assert made["set-paper-1"].critical_dimension == 20
    stored = json.loads((RECIPE.parents[1] / "results" / "smollm2" / "rows" / "paper.json").read_text())["factors"]
    assert brief["brief-paper"] == longrope2.RescaleFactors.from_json(stored)
    assert {own[name].steps for name in brief} == {12}


def test_what_a_search_in_results_has_found_is_not_searched_again(recipe, rows, bench, smollm2_rope):
    smollm2 = recipe.BASES["smollm2"]
    for (method, length), variant in smollm2.kept.items():
        stored = json.loads((rows.KEPT / "search" / "smollm2" / f"search-smollm2-{length // K}k.json").read_text())[
            "rows"
        ]
        (entry,) = (row for row in stored if (row["name"], row["seed"]) == (variant, 0))
        factors = bench.factors(f"{method}@{length // K}k")
        assert (factors.long, factors.target_length) == (tuple(entry["factors"]), length)
        assert bench.factors(f"{method}@{length // K}k-seed1") == factors
        config = search_config(target_length=length, **rows.METHODS[method].make.needs["search"])
        assert config.temperature(smollm2_rope, length) in (None, pytest.approx(entry["temperature"]))


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


def test_a_seed_shares_the_factors_of_the_first(rows, bench, tmp_path, monkeypatch):
    factors = longrope2.rescale("tiny", "yarn", 1024)
    factors.save(tmp_path / "yarn@32k" / "factors.json")
    assert bench.factors("yarn@32k-seed1") == factors


def test_what_is_left_is_expected_in_seconds(recipe, tmp_path):
    """Of the tiny model, with a part that is done and a training half way."""
    searching = replace(recipe.BASES["smollm2"], kept={})
    bench = recipe.Bench(family=searching, model="tiny", data=tmp_path, output=tmp_path)
    whole = bench.expected("paper@32k")
    assert list(whole) == ["factors", "train", *recipe.BOARD]
    assert all(seconds > 0 for seconds in whole.values())
    assert "factors" not in bench.expected("original@32k")
    assert bench.expected("switched@32k")["factors"] > bench.expected("yarn-rcd@32k")["factors"] == whole["factors"]
    (tmp_path / "paper@32k" / "needles").mkdir(parents=True)
    (tmp_path / "paper@32k" / "needles" / "results.json").write_text("{}")
    assert list(bench.expected("paper@32k")) == [part for part in whole if part != "needles"]
    longest, shorter = (bench.expected(f"yarn@{k}k")["wordings"] - recipe.FIRST_STEPS for k in (128, 32))
    assert longest > 4 * shorter
    _, paper, yarn, _ = recipe.expectation(bench, ["paper@32k", "yarn@32k"])
    assert re.match(r"paper@32k: [\d,]+ \(factors \d+, train \d+, wordings \d+, ", paper)
    assert "needles" in yarn
    # Each of RULER's answers takes its time, however short what is read is.
    few, all_tasks = (bench.expected(f"yarn@{k}k")["ruler"] for k in (128, 32))
    assert all_tasks - recipe.FIRST_STEPS > recipe.RULER_ANSWER * 13 * 4 * 20
    assert few - recipe.FIRST_STEPS > recipe.RULER_ANSWER * 5 * 3 * 20
    kept = replace(bench, family=recipe.BASES["smollm2"])
    assert {kept.expected(f"{name}@32k")["factors"] for name in ("paper", "released-cold", "yarn-rcd", "yarn")} == {0.0}
    other = recipe.Bench(family=recipe.BASES["tinyllama"], model="tiny", data=tmp_path, output=tmp_path)
    assert next(iter(other.expected("yarn@32k"))) == "repair"


@pytest.fixture
def small(recipe, rows, tmp_path, monkeypatch):
    """A base that takes seconds on a CPU, with a repair first."""
    books = {"train": slice(0, 2), "search": slice(2, 3), "validation": slice(3, 4)}
    found = list(read_books())
    for part, which in books.items():
        folder = tmp_path / "data" / "books" / part
        folder.mkdir(parents=True)
        for number, book in enumerate(found[which] or found[:1]):
            (folder / f"{number}.txt").write_text(book.text[:100_000], encoding="utf-8")
    schedule = {"population": 4, "iterations": 1, "mutations": 2, "crossovers": 1, "documents": 2, "held_out": 1}
    monkeypatch.setattr(rows, "SEARCH", schedule)

    def evaluation(name, row):
        kinds = {**recipe.NEEDLES, **dict.fromkeys(recipe.TASKS, "short"), "hellaswag": "short", "piqa": "short"}
        lengths = (256,) if name == "needles" else (256, row.length)
        return {"suites": (kinds.get(name, name),), "lengths": lengths, "samples": 1 if name in recipe.NEEDLES else 2}

    monkeypatch.setattr(recipe, "evaluation", evaluation)
    family = rows.Base(
        title="tiny, repaired",
        window=256,
        lengths={1024: rows.Training(steps=2, batch_rows=2, plan_rows=20)},
        repair=rows.Training(steps=1, batch_rows=4),
    )
    calibration = {"documents": 5, "lengths": (128, 192)}
    return recipe.Bench(
        family=family,
        model="tiny",
        data=tmp_path / "data",
        output=tmp_path / "out",
        calibration=calibration,
        training={},
    )


def test_a_row_on_the_tiny_model_and_again_without_doing_anything(small):
    small.family = replace(small.family, repair=None)
    small.prepare("yarn@1k", {"needles"})
    samples = sorted((small.output / "samples").iterdir())
    assert [path.name.split("-")[0] for path in samples] == ["niah"]
    small.run("yarn@1k", {"needles"})
    assert sorted((small.output / "samples").iterdir()) == samples
    row = json.loads((small.output / "yarn@1k.json").read_text())
    assert (row["name"], row["table"], row["model"]) == ("YaRN", "tiny, repaired, 1k", "tiny, repaired")
    assert row["cost"]["tokens"] == 2 * 2 * 1024
    # What cannot end in time is not begun; what is done is not done again.
    before = (small.output / "yarn@1k" / "train" / "model" / "model.safetensors").stat()
    small.run("yarn@1k", {"needles", "perplexity"}, until=time.monotonic())
    assert not (small.output / "yarn@1k" / "perplexity").exists()
    assert (small.output / "yarn@1k" / "train" / "model" / "model.safetensors").stat() == before


def test_the_command_says_what_rows_take(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "sys.argv", ["run.py", "qwen", "tiny", "--data", "d", "-o", str(tmp_path), "--expect", "pi@128k"]
    )
    assert recipe.main() == 0
    assert "pi@128k" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("sys.argv", ["run.py", "qwen", "tiny", "--data", "d", "-o", str(tmp_path), "pi@32k"])
    assert recipe.main() == 2
    assert "hint: to 128k" in capsys.readouterr().err


def test_rows_are_measured_while_the_next_one_is_trained(recipe, bench, monkeypatch, capsys):
    trained, next_began, asked = [], threading.Event(), []

    def run(_, name, only, until):
        assert (only, until) == (set(), None)
        trained.append(name)
        if name == "ntk@32k":
            assert next_began.wait(60)  # until a part of the row before is measured

    def measured(command, check):
        next_began.set()
        options = dict(zip(command[5::2], command[6::2], strict=True))
        assert (command[2:4], check) == (["smollm2", "m"], False)
        asked.append((command[4], options["--only"]))
        return subprocess.CompletedProcess(command, returncode=int(options["--only"] == "piqa"))

    left = {"yarn@32k": {"arc": 1.0, "piqa": 2.0, "ruler": 3.0}, "ntk@32k": {"train": 9.0, "arc": 1.0}}
    monkeypatch.setattr(recipe.Bench, "run", run)
    monkeypatch.setattr(recipe.Bench, "expected", lambda _, name: left[name])
    monkeypatch.setattr(recipe.subprocess, "run", measured)
    command = ["run.py", "smollm2", "m", "yarn@32k", "ntk@32k", "--data", "d", "-o", str(bench.output), "--beside", "2"]
    monkeypatch.setattr("sys.argv", [*command, "--only", "arc,piqa"])
    assert recipe.main() == 1
    assert trained == ["yarn@32k", "ntk@32k"]
    assert sorted(asked) == [("yarn@32k", "arc"), ("yarn@32k", "piqa")]
    assert "yarn@32k: piqa failed with exit code 1" in capsys.readouterr().err
    # Without --data the parts are measured without it, too.
    monkeypatch.setattr(
        recipe.subprocess, "run", lambda command, check: asked.append(command) or measured(command, check)
    )
    left["yarn@32k"], left["ntk@32k"] = {"arc": 1.0, "ruler": 3.0, "needles": 2.0}, {}
    asked.clear()
    monkeypatch.setattr("sys.argv", ["run.py", "smollm2", "m", "yarn@32k", "-o", str(bench.output), "--beside", "1"])
    assert recipe.main() == 0
    assert not any("--data" in command for command in asked[::2])
    assert [part for _, part in asked[1::2]] == ["ruler", "needles", "arc"]


@pytest.mark.slow
def test_parts_that_are_measured_side_by_side_are_all_in_the_row(tmp_path):
    texts = ("the sea was calm and the sky was blue", "he went up the hill and down the hill")
    solutions = {"goal": "to open a door", "sol1": "turn the handle", "sol2": "sing a song"}
    files = {
        "lambada_openai_test": [{"text": text} for text in texts],
        "piqa_val": [{**solutions, "label": label} for label in (0, 1)],
    }
    for folder in ("short", "books/validation"):
        (tmp_path / "data" / folder).mkdir(parents=True)
    (tmp_path / "data" / "books" / "validation" / "a.txt").write_text(next(iter(read_books())).text, encoding="utf-8")
    for name, lines in files.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / "data" / "short" / f"{name}.jsonl").write_text(text, encoding="utf-8")
    options = ["--data", str(tmp_path / "data"), "-o", str(tmp_path / "out"), "--only", "lambada,piqa", "--beside", "2"]
    command = [sys.executable, str(RECIPE / "run.py"), "smollm2", "tiny", "original@32k", *options]
    subprocess.run(command, check=True, timeout=300)
    row = json.loads((tmp_path / "out" / "original@32k.json").read_text())
    assert [score["task"] for score in row["scores"]] == ["lambada_openai", "piqa"]


@pytest.mark.slow
def test_all_kinds_of_rows_on_the_tiny_model_and_their_leaderboard(small):
    """The switch of a calibration is that of the trained model, and what plans call short follows it."""
    for name in ("original@1k", "yarn@1k", "yarn@1k-seed1", "drope@1k", "paper@1k", "switched@1k", "yarn-rcd@1k"):
        small.run(name, {"needles", "wordings", "longppl", "perplexity"})
    assert small.base != small.unpacked
    repaired, unpacked = (
        json.loads((Path(folder) / "config.json").read_text()) for folder in (small.base, small.unpacked)
    )
    assert repaired["rope_parameters"] == unpacked["rope_parameters"]
    weights = [weights_fingerprint(longrope2.describe(folder)) for folder in (small.base, small.unpacked)]
    assert weights[0] != weights[1]
    switched = json.loads((small.output / "switched@1k.json").read_text())
    switch = switched["factors"]["original_length"]
    assert switch <= 256
    trained = longrope2.describe(small.output / "switched@1k" / "train" / "model")
    assert trained.rope.original_length == switch
    assert switched["factors"]["long"] == json.loads((small.output / "paper@1k.json").read_text())["factors"]["long"]
    boards = leaderboards(sorted(small.output.glob("*@*.json")), against="YaRN").boards
    assert [(board.table, board.length) for board in boards] == [
        ("tiny, repaired, 1k", 1024),
        ("tiny, repaired, 1k", 256),
    ]
    assert len(boards[0].standings["YaRN"]["Needles in other wordings"].seeds) == 2
    assert set(boards[0].standings["DroPE"]) >= {"Needles in other wordings", "LongPPL of books"}
    assert len(boards[0].standings) == 6
