"""The figures of a report: what each one draws, says, and holds as data."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from longrope2 import figures, ledger
from longrope2.evaluation.suites import summarised
from longrope2.methods import rescale
from longrope2.records import HELD_OUT
from longrope2.report.gather import RunData
from longrope2.report.summary import Summary, by_length, label

VISIBLE = 1.01
"""The least ratio of two perplexities that a curve shows."""
KEPT = {
    "perplexity_retention": "Short perplexity: that of the original over that of each method, on the same books within "
    "the original window.",
    "short_retention": "Short tasks: mean score over the original's.",
}


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One figure with its caption and its data."""

    name: str
    """Of its files."""
    title: str
    caption: str
    columns: tuple[str, ...]
    rows: list[list[Any]]
    draw: Callable[[Path | None], figures.Drawing]
    panels: tuple[Callable[[None], figures.Drawing], ...] = ()
    """Parts that a page shows side by side as far as there is room; none: the whole figure."""


def charts(data: RunData, summary: Summary) -> list[Chart]:
    """Every figure that the run has data for."""
    return [
        *_factors(data),
        *_convergence(data),
        *_losses(data),
        *_by_length(data),
        *_heatmaps(data),
        *_retention(summary),
        *_times(data),
    ]


def _factors(data: RunData) -> Iterator[Chart]:
    if (found := data.factors) is None:
        return
    closed = {name: rescale(name, found.spec, found.target_length) for name in data.book.recipe["methods"]}
    columns = [factors.long for factors in (*closed.values(), found)]
    yield Chart(
        name="factors",
        title="Factors",
        caption="What each frequency of RoPE is divided by in long sequences. Below d_rcd a shape, from d_rcd on the "
        "search; d_tcd is where theory puts the critical dimension, s the extension ratio.",
        columns=("dimension", *closed, ledger.AFTER_TRAINING),
        rows=[[i, *row] for i, row in enumerate(zip(*columns, strict=True))],
        draw=partial(figures.draw_factors, {label(name): f for name, f in closed.items()} | {"LongRoPE2": found}),
    )


def _convergence(data: RunData) -> Iterator[Chart]:
    result = data.search
    found = [entry.perplexity for entry in result.convergence if entry.perplexity is not None] if result else []
    if result is None or not found or max(found) < VISIBLE * min(found):
        return  # nothing to see: the first candidate stayed the best
    history = result.convergence
    measured = [row for row in result.scores if row.method in data.book.recipe["methods"]]
    levels = {label(row.method): row.perplexity for row in measured if row.perplexity is not None}
    held_out = ", on documents that were held out" if any(row.part == HELD_OUT for row in measured) else ""
    columns = ("length", "iteration", "perplexity", "critical_dimension", "evaluations", "exhaustive_evaluations")
    yield Chart(
        name="convergence",
        title="Search",
        caption=f"{result.document_evaluations:,} document evaluations; without racing it would have been "
        f"{result.exhaustive_evaluations:,}. Levels: closed forms at {history[-1].length:,} tokens{held_out}.",
        columns=columns,
        rows=[[getattr(entry, column) for column in columns] for entry in history],
        draw=partial(figures.draw_convergence, history, levels=levels),
    )


def _losses(data: RunData) -> Iterator[Chart]:
    kinds = {kind: f"loss_{kind}" for kind in ("short", "long")}
    points = {k: [(line.step, line.losses[n]) for line in data.log if n in line.losses] for k, n in kinds.items()}
    by_kind = {kind: found for kind, found in points.items() if found}
    if not by_kind:
        return
    which = "Short rows with the original RoPE, long rows with the rescaled one."
    if data.book.recipe.get("train", {}).get("window") == "single":
        which = "All rows with the rescaled RoPE."
    thinned = ""
    if any(len(points) > figures.MOST_POINTS for points in by_kind.values()):
        thinned = " Drawn are the lowest and the highest step of each stretch; all steps are in the data."
    columns = ("step", *(f"loss_{kind}" for kind in by_kind), "loss", "learning_rate", "tokens", "seconds")
    yield Chart(
        name="losses",
        title="Training",
        caption=f"{which} Rows differ, so the loss varies from step to step.{thinned}",
        columns=columns,
        rows=[[getattr(line, column) for column in columns] for line in data.log],
        draw=partial(figures.draw_losses, by_kind),
    )


def _by_length(data: RunData) -> Iterator[Chart]:
    columns = ("length", "score", "low", "high", "samples")
    for suite in summarised():
        series = {method: own for method, scores in data.scores.items() if (own := by_length(scores, suite.name))}
        if not series:
            continue
        yield Chart(
            name=f"{suite.name}-by-length",
            title=suite.title,
            caption="Scores by length with 95% intervals.",
            columns=("method", *columns),
            rows=[
                [method, *(getattr(score, c) for c in columns)] for method, scores in series.items() for score in scores
            ],
            draw=partial(figures.draw_by_length, _labelled(series), label="right answers (%)"),
        )


def _heatmaps(data: RunData) -> Iterator[Chart]:
    grids = data.grids
    if not grids:
        return
    yield Chart(
        name="needles",
        title="Needles by length and depth",
        caption="Share of needles found (%). Depth 0% is the start of the text, 100% its end, before the question.",
        columns=("method", "length", "depth", "score", "samples"),
        rows=[
            [method, length, depth, cell.score, cell.samples]
            for method, grid in grids.items()
            for depth, row in zip(grid.depths, grid.cells, strict=True)
            for length, cell in zip(grid.lengths, row, strict=True)
        ],
        draw=partial(figures.draw_heatmaps, _labelled(grids)),
        panels=tuple(partial(figures.draw_heatmaps, {name: grid}) for name, grid in _labelled(grids).items()),
    )


def _labelled(by_method: Mapping[str, Any]) -> dict[str, Any]:
    return {label(method): value for method, value in by_method.items()}


def _retention(summary: Summary) -> Iterator[Chart]:
    names = {"perplexity_retention": "short perplexity", "short_retention": "short tasks"}
    values = [
        (method, key, value)
        for key in names
        for method, found in summary.methods.items()
        if (value := getattr(found, key)) is not None
    ]
    if not values:
        return
    measures = dict.fromkeys(key for _, key, _ in values)
    bars = [
        (label(method), label(method) if len(measures) == 1 else f"{label(method)}, {names[key]}", value)
        for method, key, value in values
    ]
    yield Chart(
        name="retention",
        title="Kept in the original window",
        caption=" ".join(KEPT[key] for key in measures),
        columns=("method", "measure", "percent"),
        rows=[list(value) for value in values],
        draw=partial(figures.draw_bars, bars, label="% of the original", reference=100),
    )


def stage_seconds(data: RunData) -> dict[str, float]:
    """Time of each stage, over its steps, as far as they are done."""
    seconds: dict[str, float] = {}
    for name, entry in data.steps.items():
        stage = name.partition("/")[0]
        seconds[stage] = seconds.get(stage, 0.0) + entry.seconds
    return {stage: seconds[stage] for stage in ledger.STAGES if stage in seconds}


def _times(data: RunData) -> Iterator[Chart]:
    seconds = {stage: value for stage, value in stage_seconds(data).items() if value > 0}
    if not seconds:
        return
    bars = [("time", stage, value) for stage, value in seconds.items()]
    yield Chart(
        name="time",
        title="Time by stage",
        caption="Wall-clock seconds of all sessions, except those that were killed.",
        columns=("stage", "seconds"),
        rows=[[stage, value] for stage, value in seconds.items()],
        draw=partial(figures.draw_bars, bars, label="seconds"),
    )
