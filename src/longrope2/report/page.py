"""`longrope2 report`: a run's folder becomes one page that needs nothing but itself, with figures and their data."""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from longrope2 import __version__, figures, ledger
from longrope2.console import duration, warn
from longrope2.errors import MissingExtraError, counted
from longrope2.evaluation.suites import summarised
from longrope2.export.engines import guidance
from longrope2.figures import length_label
from longrope2.files import atomic_path, public, write_text
from longrope2.records import Cell, Finding, StageRun
from longrope2.report.charts import Chart, charts, stage_seconds
from longrope2.report.gather import RunData, gather
from longrope2.report.summary import Summary, by_length, label, summarise

OURS = (ledger.EXPORTED, ledger.AFTER_TRAINING, ledger.SEARCHED)
SEVERITY = ("right", "not checked", "known limit", "FAILED", "WRONG")


def write_report(folder: Path) -> Path:
    """Write the page of what a run has so far, its figures as PNG and their data as CSV; returns the page's path.

    Without matplotlib the page has tables alone, and says how to get the figures.
    """
    data = gather(folder)
    summary = summarise(data)
    found = charts(data, summary)
    path = folder / ledger.PAGE
    for chart in found:
        with atomic_path(path.with_name(f"{chart.name}.csv")) as temporary:
            _write_csv(chart, temporary)
    missing = ""
    drawn: dict[str, list[str]] = {}
    try:
        for chart in found:
            drawn[chart.name] = _draw(chart, path.with_name(f"{chart.name}.png"))
    except MissingExtraError as error:
        missing = str(error)
        warn(missing)
    write_text(path, page(data, summary, found, drawn, missing))
    return path


def _write_csv(chart: Chart, path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([chart.columns, *chart.rows])


def _draw(chart: Chart, path: Path) -> list[str]:
    """Write a figure as PNG; return the SVG elements that the page shows of it."""
    whole = chart.draw(path)
    panels = [draw(None) for draw in chart.panels] or [whole]
    return [panel.svg(f"{chart.name}-{number}") for number, panel in enumerate(panels)]


def page(
    data: RunData, summary: Summary, charts: Sequence[Chart], drawn: Mapping[str, Sequence[str]], missing: str = ""
) -> str:
    """The whole page, with figures as SVG elements by name; `missing` says why there are none."""
    templates = Environment(
        loader=PackageLoader("longrope2", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return templates.get_template("page.html.j2").render(
        title=f"{public(data.book.model)}: {summary.title.rpartition(', ')[2]}",
        state=_state(data),
        verdict=_verdict(data, summary),
        checked=_checked(data),
        summary=summary,
        ours=[label(method) for method in OURS],
        cards=list(_cards(data, summary)),
        charts=charts,
        drawn=drawn,
        missing=missing,
        costs=[[stage, duration(seconds), _work(data, stage), _machine(data, stage)]
               for stage, seconds in stage_seconds(data).items()],
        exports=list(_exports(data)),
        verified=list(_verified(data)),
        facts=_facts(data),
        recipe=json.dumps(public(data.book.recipe), indent=1, ensure_ascii=False),
        version=__version__,
        light=figures.LIGHT,
        dark=figures.DARK,
    )  # fmt: skip


def _state(data: RunData) -> str:
    running = [name for name, entry in data.steps.items() if not entry.is_done]
    done = list(dict.fromkeys(name.partition("/")[0] for name in data.steps if name not in running))
    text = f"Done: {', '.join(done) or 'nothing yet'}."
    if set(running) - {"report"}:
        text += f" Not finished: {', '.join(running)}."
    if outdated := [name for name in data.book.steps if name not in data.steps]:
        text += f" Left out, made with other options: {', '.join(outdated)}."
    return text


def _verdict(data: RunData, summary: Summary) -> str:
    """What came of it, in a sentence or two; empty where nothing was measured."""
    ours = next((method for method in OURS if method in summary.methods), None)
    suite = next((suite for suite in summarised() if ours and suite.name in summary.methods[ours].by_length), None)
    if ours is None or suite is None:
        return ""
    at = {
        name: {score.length: score.percent for score in by_length(own, suite.name)} for name, own in data.scores.items()
    }
    longest = max(at[ours], key=lambda length: length or 0)
    own, place = at[ours][longest], length_label(longest or 0)
    text = f"{label(ours)}: {own.score:.1f}% of {suite.summary} at {place}"
    if longest in at.get(ledger.BASE, {}):
        text += f", where the original model has {at[ledger.BASE][longest].score:.1f}%"
    closed = {
        name: found[longest] for name, found in at.items() if name not in (*OURS, ledger.BASE) and longest in found
    }
    if closed:
        best = max(closed, key=lambda name: closed[name].score)
        text += f" and the best closed form, {label(best)}, {closed[best].score:.1f}% ({_compared(own, closed[best])})"
    kept = summary.methods[ours].perplexity_retention
    return text + (f". Within the original window it keeps {kept:.1f}% of the perplexity." if kept else ".")


def _compared(own: Cell, other: Cell) -> str:
    if own.low > other.high:
        return "more than chance explains"
    return "less, and not by chance" if own.high < other.low else "not a difference at this number of samples"


def _checked(data: RunData) -> list[tuple[str, str, str]]:
    """Each engine that was asked with its verdict, the worst of all lengths, and how that is coloured."""
    found: dict[str, list[Finding]] = {}
    for findings in (data.verified.exports if data.verified else {}).values():
        for finding in findings:
            found.setdefault(finding.engine, []).append(finding)
    worst = [max(findings, key=lambda finding: SEVERITY.index(finding.verdict)) for findings in found.values()]
    shown = {"right": ("right", "right"), "known limit": ("right, with a known limit", "limit")}
    return [(one.engine, *shown.get(one.verdict, (one.verdict, "wrong" if one.is_wrong else "open"))) for one in worst]


def _cards(data: RunData, summary: Summary) -> Iterator[tuple[str, str]]:
    """The few numbers that say what came of it."""
    if data.factors:
        original, target = data.factors.original_length, data.factors.target_length
        yield f"{target / original:g}×", f"window, {original:,} → {target:,} tokens"
    if data.calibration:
        yield f"{data.calibration.within_window:,}", "tokens up to which it keeps the original RoPE, measured"
    ours = next((method for method in OURS if method in summary.methods), None)
    if ours:
        yield from _score_cards(summary, ours)
    seconds = sum(stage_seconds(data).values())
    if seconds:
        yield duration(seconds), "hours:minutes:seconds" if seconds >= 3600 else "minutes:seconds, all stages"


def _score_cards(summary: Summary, ours: str) -> Iterator[tuple[str, str]]:
    for suite in summarised():
        own = summary.methods[ours].by_length.get(suite.name)
        if not own:
            continue
        longest = max(own, key=int)
        others = {
            name: found.by_length.get(suite.name, {}).get(longest)
            for name, found in summary.methods.items()
            if name not in (*OURS, ledger.BASE)
        }
        known = {name: value for name, value in others.items() if value is not None}
        best = max(known, key=lambda name: known[name], default=None)
        beside = f"; best closed form, {label(best)}: {known[best]:.1f}%" if best else ""
        yield f"{own[longest]:.1f}%", f"{suite.summary} at {length_label(int(longest))}{beside}"
    for key, text in (("perplexity_retention", "of the short perplexity kept"), ("short_retention", "of short tasks")):
        if (value := getattr(summary.methods[ours], key)) is not None:
            yield f"{value:.1f}%", text


def _work(data: RunData, stage: str) -> str:
    if stage == "search" and data.search:
        tokens = data.search.document_evaluations * data.book.target_length
        return f"{counted(data.search.document_evaluations, 'evaluation')}, {tokens:,} tokens"
    if stage == "data" and data.plan:
        return counted(data.plan.rows, "row")
    if stage == "train" and data.log:
        return f"{counted(len(data.log), 'step')}, {sum(line.tokens for line in data.log):,} tokens"
    if stage == "evaluate":
        return counted(len(data.evaluations), "evaluation")
    if stage == "export":
        return ", ".join(f"{entry.bytes / 1e6:,.0f} MB" for entry in data.exports)
    return ""


def _machine(data: RunData, stage: str) -> str:
    by_stage: dict[str, list[StageRun | None]] = {"search": [data.search], "train": [data.training]}
    works = [*data.evaluations.values()] if stage == "evaluate" else by_stage.get(stage, [])
    return ", ".join(dict.fromkeys(f"{work.processes} × {work.device}" for work in works if work))


def _exports(data: RunData) -> Iterator[tuple[str, Sequence[tuple[str, str, str]]]]:
    """For each export its name, and how each engine serves it."""
    for entry in data.exports:
        name = Path(entry.place).name
        if factors := entry.factors or data.factors:
            yield name, guidance(factors, entry.family, name, "gguf" if name.endswith(".gguf") else "huggingface")


def _verified(data: RunData) -> Iterator[list[str]]:
    for findings in (data.verified.exports if data.verified else {}).values():
        for finding in findings:
            error = "" if finding.max_error is None else f"{finding.max_error:.1e}"
            yield [finding.engine, finding.mode, finding.verdict, error, finding.note]


def _facts(data: RunData) -> dict[str, str]:
    """Where the run's numbers come from."""
    seeds = {
        "search": data.search and data.search.config.get("evolution", {}).get("seed"),
        "plan": data.plan and data.plan.config.get("seed"),
        "train": data.training and data.training.config.get("train", {}).get("seed"),
    }
    facts = {
        "model": public(data.book.model),
        "revision": data.book.revision,
        "weights": data.search.weights if data.search else None,
        "versions": json.dumps(data.book.versions),
        "seeds": json.dumps(seeds),
    }
    return {name: value for name, value in facts.items() if value is not None}
