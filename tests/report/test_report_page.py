"""The page of a run: its numbers are those on disk, it needs nothing else, and half a run gives half a page."""

import csv
import json
import random
import re
import sys
from html.parser import HTMLParser

import pytest
from report_samples import METHODS, STEPS, found_factors, make_run

from longrope2 import ledger
from longrope2.errors import LongRopeError
from longrope2.figures import DARK, LIGHT
from longrope2.methods import rescale
from longrope2.records import Finding, VerifyRecord, as_json
from longrope2.report import charts
from longrope2.report.gather import gather
from longrope2.report.page import write_report
from longrope2.report.summary import MethodSummary, Summary, label, summarise

FIGURES = ("factors", "convergence", "losses", "niah-by-length", "needles", "retention", "time")


class Page(HTMLParser):
    """What a page holds: marks of each section with their texts, tables, ids and every address it speaks of."""

    def __init__(self, text):
        super().__init__()
        self.marks, self.tables, self.addresses, self.ids, self.open = {}, [], [], [], []
        self._section, self._cell = None, None
        self.feed(text)
        assert self.open == [], "unclosed tags"

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)
        self.addresses += [found[name] for name in ("src", "href") if name in found]
        self.addresses += re.findall(r"url\((.*?)\)", " ".join(value or "" for value in found.values()))
        self.ids += [found["id"]] if "id" in found else []
        if tag == "section":
            self._section = found.get("id")
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self._cell = ""
        if "data-y" in found:
            self.marks.setdefault(self._section, []).append(found)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        if tag in ("td", "th") and self._cell is not None:
            self.tables[-1][-1].append(self._cell)
            self._cell = None
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self._cell is not None:
            self._cell += data
        if self.open[-2:] == ["rect", "title"]:
            self.marks[self._section][-1]["tip"] = data

    def points(self, section, series):
        return [(float(m["data-x"]), float(m["data-y"])) for m in self.marks[section] if m.get("data-series") == series]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "one")


@pytest.fixture(scope="module")
def page(run):
    return Page(write_report(run).read_text())


def results(run, method, suite):
    return json.loads((run / f"evaluate/{method}/{suite}/results.json").read_text())


def test_every_mark_stands_for_a_value_on_disk(run, page):
    assert page.points("factors", "LongRoPE2") == list(enumerate(found_factors().long))
    assert page.points("factors", "YaRN") == list(enumerate(rescale("yarn", found_factors().spec, 4096).long))
    convergence = json.loads((run / ledger.SEARCH).read_text())["convergence"]
    last = [entry for entry in convergence if entry["length"] == 4096]
    assert page.points("convergence", "perplexity-4096") == [(e["iteration"], e["perplexity"]) for e in last]
    log = [json.loads(line) for line in (run / ledger.TRAINING_LOG).read_text().splitlines()]
    assert page.points("losses", "long rows") == [(line["step"], line["loss_long"]) for line in log]
    assert page.points("losses", "short rows") == [(line["step"], line["loss_short"]) for line in log]
    for method in METHODS:
        scores = results(run, method, "niah")["scores"]
        assert page.points("niah-by-length", label(method)) == [(s["length"], s["score"]) for s in scores]
    cells = [c["score"] for m in METHODS for row in results(run, m, "niah")["grids"]["niah"]["cells"] for c in row]
    assert [float(mark["data-y"]) for mark in page.marks["needles"]] == cells
    base = results(run, "base", "perplexity")["scores"][0]["score"]
    kept = [100 * (base / results(run, m, "perplexity")["scores"][0]["score"]) for m in METHODS]
    assert [float(mark["data-y"]) for mark in page.marks["retention"]] == kept
    assert kept[0] == 100
    seconds = {}
    for name, entry in json.loads((run / "pipeline.json").read_text())["steps"].items():
        seconds[name.partition("/")[0]] = seconds.get(name.partition("/")[0], 0) + entry["seconds"]
    assert [float(mark["data-y"]) for mark in page.marks["time"]] == list(seconds.values())


def set_scores(run, scores):
    """Give methods other needle scores at the full length, each 5 points either side."""
    for method, score in scores.items():
        path = run / f"evaluate/{method}/niah/results.json"
        content = json.loads(path.read_text())
        content["scores"][-1] |= {"score": score, "low": max(score - 5, 0.0), "high": min(score + 5, 100.0)}
        path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        (90.0, "more than chance explains"),
        (72.0, "not a difference at this number of samples"),
        (50.0, "less, and not by chance"),
    ],
)
def test_it_opens_with_a_verdict(tmp_path, ours, words):
    run = make_run(tmp_path / "run")
    set_scores(run, {"base": 1.0, "pi": 20.0, "yarn": 70.0, ledger.SEARCHED: 99.0, ledger.AFTER_TRAINING: ours})
    text = write_report(run).read_text()
    expected = (
        f"LongRoPE2, trained: {ours:.1f}% of needles at 4k, where the original model has 1.0% and the best closed "
        f"form, YaRN, 70.0% ({words}). Within the original window it keeps "
    )
    assert text.index(expected) < text.index("<h2>")
    assert text.count('<tr class="ours"><td>LongRoPE2, ') == 2
    assert 'class="ours"><td>YaRN' not in text


def test_without_scores_there_is_no_verdict(tmp_path):
    assert 'class="verdict"' not in write_report(make_run(tmp_path / "run", stages=("search",))).read_text()


@pytest.mark.parametrize(
    ("verdicts", "shown"),
    [
        (("right", "right"), '<span class="right">transformers 5: right</span>'),
        (("right", "WRONG"), '<span class="wrong">transformers 5: WRONG</span>'),
        (("FAILED", "right"), '<span class="wrong">transformers 5: FAILED</span>'),
        (("right", "known limit"), '<span class="limit">transformers 5: right, with a known limit</span>'),
        (("not checked",), '<span class="open">transformers 5: not checked</span>'),
    ],
)
def test_the_worst_verdict_of_each_engine_is_at_the_top(tmp_path, verdicts, shown):
    run = make_run(tmp_path / "run")
    findings = tuple(Finding("transformers 5", str(mode), 0.1, verdict, "") for mode, verdict in enumerate(verdicts))
    VerifyRecord(exports={"export/tiny-4k": findings}).save(run / ledger.VERIFIED)
    text = write_report(run).read_text()
    assert text.index(shown) < text.index("<h2>")


def test_a_search_that_found_nothing_better_has_no_figure(tmp_path):
    run = make_run(tmp_path / "run", stages=("search",))
    content = json.loads((run / ledger.SEARCH).read_text())
    for number, entry in enumerate(content["convergence"]):
        entry["perplexity"] = 2.5 + 0.001 * (number == 0)
    (run / ledger.SEARCH).write_text(json.dumps(content))
    assert "convergence" not in Page(write_report(run).read_text()).ids


def test_a_training_with_one_rope_is_told_as_one(tmp_path):
    one = make_run(tmp_path / "one", stages=("search", "data", "train"))
    assert "Short rows with the original RoPE" in write_report(one).read_text()
    book = json.loads((one / "pipeline.json").read_text())
    book["recipe"]["train"] = {"window": "single"}
    del book["checksum"]
    (one / "pipeline.json").write_text(json.dumps(book))
    text = write_report(one).read_text()
    assert "All rows with the rescaled RoPE." in text
    assert "original RoPE" not in text


def test_the_table_has_the_same_numbers(run, page):
    header, *rows = page.tables[0]
    assert header == ["", "needles 256", "needles 4k", "short PPL", "kept"]
    for row, method in zip(rows, METHODS, strict=True):
        needles = [s["score"] for s in results(run, method, "niah")["scores"]]
        perplexity = results(run, method, "perplexity")["scores"][0]["score"]
        base = results(run, "base", "perplexity")["scores"][0]["score"]
        shown = [label(method), *(f"{n:.1f}%" for n in needles), f"{perplexity:.2f}", f"{100 * base / perplexity:.1f}%"]
        assert row == shown


def test_the_page_needs_nothing_but_itself(run, page):
    beside = {path.name for path in (run / "report").iterdir()}
    assert {address for address in page.addresses if not address.startswith(("data:", "#"))} <= beside
    assert len(page.ids) == len(set(page.ids)), "an id of one figure would mean that of another"
    assert {address[1:] for address in page.addresses if address.startswith("#")} <= set(page.ids)
    text = (run / "report/index.html").read_text()
    assert not re.search(r"@import|https?://", text)
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    assert str(run.parent) not in text


def test_marks_tell_their_values(page):
    told = {name: [mark["tip"] for mark in marks] for name, marks in page.marks.items()}
    assert told["losses"][0] == "step 1, short rows: 3.5000"
    assert "LongRoPE2: λ_9 = 18.14" in told["factors"]
    assert "4,096 tokens, iteration 1: 1.75, d_rcd 10, 20 evaluations" in told["convergence"]
    assert re.fullmatch(r"original, 256 tokens: [\d.]+% \([\d.]+–[\d.]+%, 6 samples\)", told["niah-by-length"][0])
    assert re.fullmatch(r"original, 256 tokens, depth 0%: [\d.]+%", told["needles"][0])
    assert told["retention"][0] == "original: 100.00 % of the original"
    assert re.fullmatch(r"search: [\d.]+ seconds", told["time"][0])


def test_every_colour_has_a_dark_form(run, page):
    """A figure uses the page's variables, so a dark page has no dark lines."""
    text = (run / "report/index.html").read_text()
    figures = "".join(re.findall("<svg.*?</svg>", text, flags=re.DOTALL))
    assert not [colour for colour in LIGHT.values() if colour in figures.lower()]
    assert set(re.findall(r"var\(--(\w+)\)", figures)) <= set(LIGHT) == set(DARK)
    for colours in (LIGHT, DARK):
        assert all(f"--{name}: {value};" in text for name, value in colours.items())
    assert "<style" not in figures, "a figure's style would reach the whole page"


def test_the_same_run_gives_the_same_files(run, page):
    before = {path.name: path.read_bytes() for path in (run / "report").iterdir()}
    write_report(run)
    assert {path.name: path.read_bytes() for path in (run / "report").iterdir()} == before


def test_without_matplotlib_the_page_has_tables_and_says_what_is_missing(tmp_path, monkeypatch, capsys):
    folder = make_run(tmp_path / "one")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = Page(write_report(folder).read_text())
    assert "pip install 'longrope2[report]'" in capsys.readouterr().err
    text = (folder / "report/index.html").read_text()
    assert ("pip install &#39;longrope2[report]&#39;" in text, "<svg" in text) == (True, False)
    assert found.tables[0][0][1] == "needles 256"
    assert {path.name for path in (folder / "report").iterdir()} == {"index.html", *(f"{n}.csv" for n in FIGURES)}
    assert {f"{name}.csv" for name in FIGURES} <= set(found.addresses)


def test_a_long_training_is_thinned(tmp_path):
    folder = make_run(tmp_path / "long", stages=("train",))
    line, rng = json.loads((folder / ledger.TRAINING_LOG).read_text().splitlines()[0]), random.Random(0)
    losses = {n: {"loss_short": 2 + rng.random(), "loss_long": 3 + rng.random()} for n in range(1, 20_001)}
    losses[7_001]["loss_long"] = 9.5
    lines = (json.dumps({**line, "step": step, **values}) for step, values in losses.items())
    (folder / ledger.TRAINING_LOG).write_text("\n".join(lines) + "\n")
    path = write_report(folder)
    assert path.stat().st_size < 1e6
    found = Page(path.read_text())
    assert 300 < len(found.points("losses", "long rows")) <= 400
    assert (7_001, 9.5) in found.points("losses", "long rows"), "a peak is not lost"
    assert all(losses[step]["loss_long"] == value for step, value in found.points("losses", "long rows"))
    with (folder / "report/losses.csv").open() as file:
        assert sum(1 for _ in file) == 20_001


def test_hostile_names_are_text(tmp_path):
    folder = make_run(tmp_path / "run", stages=("search",))
    name = "</title><script>alert('$x_1$')</script>"
    book = json.loads((folder / "pipeline.json").read_text())
    book["model"] = book["recipe"]["note"] = name
    del book["checksum"]
    (folder / "pipeline.json").write_text(json.dumps(book))
    text = write_report(folder).read_text()
    assert text.count("<script>") == 1
    assert "&lt;/title&gt;&lt;script&gt;alert(&#39;$x_1$&#39;)" in text


def test_every_figure_is_there_as_png_and_csv(run, page):
    assert set(page.marks) == set(FIGURES)
    for name in FIGURES:
        assert (run / f"report/{name}.png").read_bytes().startswith(b"\x89PNG")
    with (run / "report/factors.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["longrope2"]) for row in rows] == list(found_factors().long)
    with (run / "report/losses.csv").open(newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == [str(n) for n in range(1, STEPS + 1)]


def test_serving_and_provenance_are_told(run, page):
    words = json.dumps(page.tables)
    for expected in ("vllm serve tiny-4k", "transformers 5", "a <b> & c", "1.5e-06", "sha256:def", "2.11"):
        assert expected in words
    text = (run / "report/index.html").read_text()
    assert "a &lt;b&gt; &amp; c" in text
    assert "&#34;search&#34;: 7, &#34;plan&#34;: 3, &#34;train&#34;: 5" in text


@pytest.mark.parametrize(
    ("stages", "figures"),
    [
        ((), ()),
        (("search",), ("factors", "convergence", "time")),
        (("search", "data", "train"), ("factors", "convergence", "losses", "time")),
        (("evaluate",), ("niah-by-length", "needles", "retention", "time")),
    ],
)
def test_part_of_a_run_gives_part_of_a_page(tmp_path, stages, figures):
    folder = make_run(tmp_path / "part", stages=stages)
    found = Page(write_report(folder).read_text())
    assert set(found.marks) == set(figures)


def test_needles_of_two_tables_are_one_map(tmp_path):
    folder = make_run(tmp_path / "two", stages=("evaluate",))
    first = json.loads((folder / "evaluate/base/niah/results.json").read_text())
    grid = first["grids"]["niah"]
    other = [[{"score": depth, "samples": 1, "low": 0.0, "high": 100.0}] for depth in range(len(grid["depths"]))]
    first["grids"]["niah"] = {"lengths": [1024], "depths": grid["depths"], "cells": other}
    (folder / "evaluate/base/niah-3").mkdir()
    (folder / "evaluate/base/niah-3/results.json").write_text(json.dumps(first))
    book = ledger.Ledger(folder)
    book.start("evaluate/base/niah-3", {})
    book.finish("evaluate/base/niah-3", {}, 1.0)
    found = as_json(gather(folder).grids["base"])
    assert found["lengths"] == [256, 1024, 4096]
    expected = [[row[0], new[0], row[1]] for row, new in zip(grid["cells"], other, strict=True)]
    assert found["cells"] == expected


def test_an_unfinished_step_is_named(tmp_path):
    folder = make_run(tmp_path / "part", stages=("search",))
    ledger.Ledger(folder).start("train", {})
    assert "Not finished: train." in write_report(folder).read_text()
    ledger.Ledger(folder).describe(expected={"search": "another"})
    page = write_report(folder).read_text()
    assert "Done: nothing yet. Not finished: train. Left out, made with other options: search." in page
    assert Page(page).marks.keys() == set()


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(LongRopeError, match="no run of `longrope2 extend` there"):
        write_report(tmp_path)
    (tmp_path / "pipeline.json").write_text('{"format": "other"}')
    with pytest.raises(LongRopeError, match=r"expected 'longrope2\.pipeline', 1"):
        gather(tmp_path)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("pipeline.json", '{"format": "longrope2.pipeline", "version": 1}'),
        (ledger.PLAN, '{"rows": 2'),
        (ledger.PLAN, "{}"),
        (ledger.FACTORS, "{}"),
        (ledger.SEARCH, '{"format": "longrope2.search", "version": 3, "convergence": 3}'),
        (ledger.TRAINING_RECORD, "[]"),
        ("evaluate/base/niah/results.json", "{}"),
        ("evaluate/base/niah/results.json", "\0"),
        ("evaluate/base/niah/results.json", b'{"scores": "\xff"}'),
        (ledger.PLAN, b'{"rows": "\xff"}'),
        ("export/tiny-4k/factors.json", "{}"),
        (ledger.VERIFIED, '{"export/tiny-4k": [{}]}'),
        (ledger.VERIFIED, '{"format": "longrope2.verify", "version": 1, "exports": {"export/tiny-4k": [{}]}}'),
        ("export/tiny-4k/config.json", "[]"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, file, content):
    folder = make_run(tmp_path / "run")
    (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(LongRopeError) as caught:
        write_report(folder)
    assert str(folder / file) in caught.value.message
    assert "`longrope2 extend` again" in caught.value.hint


def test_a_damaged_grid_is_named(tmp_path):
    folder = make_run(tmp_path / "run", stages=("evaluate",))
    path = folder / "evaluate/base/niah/results.json"
    path.write_text(path.read_text().replace('"depths"', '"depth"'))
    with pytest.raises(LongRopeError, match=r"results\.json: damaged: 2 problems\n  - grids\.niah\.depths is missing"):
        write_report(folder)


def test_what_is_left_of_a_line_of_the_log_is_passed_over(tmp_path, capsys):
    folder = make_run(tmp_path / "run", stages=("train",))
    with (folder / ledger.TRAINING_LOG).open("a") as log:
        log.write('{"step": 13, "loss": 3.0}\n{"step": 14, "loss": 3.0, "tokens": 5, "loss_long": null}\n')
    assert len(gather(folder).log) == STEPS
    assert "lacks" not in capsys.readouterr().err
    lines = (folder / ledger.TRAINING_LOG).read_bytes().splitlines(keepends=True)
    (folder / ledger.TRAINING_LOG).write_bytes(b"".join([lines[0].replace(b"loss", b"lost"), *lines[1:]]))
    assert len(gather(folder).log) == STEPS - 1
    assert f"log.jsonl lacks 1 of {STEPS} steps: the figures show the others" in capsys.readouterr().err
    (folder / ledger.TRAINING_LOG).unlink()
    (folder / ledger.TRAINING_LOG).mkdir()
    assert gather(folder).log == []


@pytest.mark.parametrize(
    ("perplexity", "tasks"),
    [((100.0, 90.0), (100.0, 80.0)), ((None, None), (100.0, 80.0))],
    ids=["both", "tasks alone"],
)
def test_every_measure_of_what_is_kept_is_drawn_and_told(perplexity, tasks):
    kept = zip(("base", "yarn"), perplexity, tasks, strict=True)
    methods = {
        name: MethodSummary(by_length={}, short_perplexity=None, perplexity_retention=p, short_retention=s)
        for name, p, s in kept
    }
    (chart,) = charts._retention(Summary(title="", columns=[], rows=[], caption="", methods=methods))
    drawn = [mark.y for mark in chart.draw(None).marks]
    assert drawn == [row[2] for row in chart.rows] == [v for v in (*perplexity, *tasks) if v is not None]
    assert ("Short perplexity" in chart.caption) == (perplexity[0] is not None)
    assert "Short tasks" in chart.caption


def test_a_base_that_was_not_measured_has_no_retention(tmp_path):
    folder = make_run(tmp_path / "run", stages=("search", "evaluate"))
    for suite in ("niah", "perplexity"):
        (folder / f"evaluate/base/{suite}/results.json").unlink()
    summary = summarise(gather(folder))
    assert all(found.perplexity_retention is None for found in summary.methods.values())
    assert "kept" not in summary.columns
