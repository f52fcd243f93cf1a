"""The figures of a report: each one as SVG for the page, as data for a CSV file, and as a drawing for a PNG."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from longrope2 import figures, ledger
from longrope2.evaluation.table import TITLES
from longrope2.factors import RescaleFactors
from longrope2.figures import length_label
from longrope2.methods import rescale
from longrope2.report.summary import BY_LENGTH, Summary, label, overall
from longrope2.report.svg import Plot, heatmap, number
from longrope2.search.record import HELD_OUT

Data = Mapping[str, Any]
KEPT = {
    "perplexity_retention": "Short perplexity: that of the original over that of each method, on the same books within "
    "the original window.",
    "short_retention": "Short tasks: mean score over the original's.",
}


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One figure in its three forms."""

    name: str
    """Of its files."""
    title: str
    caption: str
    svgs: tuple[tuple[str, str], ...]
    """Headings, which may be empty, and drawings: several for small multiples."""
    columns: tuple[str, ...]
    rows: list[list[Any]]
    draw: Callable[[Path], None]
    """Writes the PNG."""


def charts(data: Data, summary: Summary) -> list[Chart]:
    """Every figure that the run has data for."""
    found = [
        _factors(data),
        _convergence(data),
        _losses(data),
        *_by_length(data),
        _heatmaps(data),
        _retention(summary),
        _times(data),
    ]
    return [chart for chart in found if chart is not None]


def _factors(data: Data) -> Chart | None:
    if data["factors"] is None:
        return None
    found = RescaleFactors.from_json(data["factors"])
    spec, ratio = found.spec, found.extension_ratio
    series = {**data["closed_forms"], ledger.AFTER_TRAINING: list(found.long)}
    highest = max(max(values) for values in series.values())
    lowest = min(1.0, *(min(values) for values in series.values()))
    plot = Plot.over(
        "Factors by RoPE dimension",
        (0, spec.num_dims - 1),
        (lowest * 0.95, max(highest, ratio) * 1.3),
        y_kind="log",
        x_label="RoPE dimension i",
        y_label="factor λ",
    )
    plot.level(ratio, f"s = {ratio:g}")
    marks = [(spec.critical_dimension, "d_tcd"), (spec.ten_period_dimension, "ten periods")]
    if found.critical_dimension is not None:
        marks.insert(0, (found.critical_dimension, "d_rcd"))
    by_place: dict[int, list[str]] = {}
    for place, name in marks:
        by_place.setdefault(place, []).append(name)
    for place, names in by_place.items():
        plot.upright(place, f"{' = '.join(names)} = {place}")
    for method, values in series.items():
        name = "LongRoPE2" if method == ledger.AFTER_TRAINING else label(method)
        tips = [f"{name}: λ_{i} = {value:.6g}" for i, value in enumerate(values)]
        plot.line(list(enumerate(values)), tips, series=method, name=name, dots=False)
    drawn = {name: rescale(name, spec, found.target_length) for name in data["closed_forms"]}
    return Chart(
        name="factors",
        title="Factors",
        caption="What each frequency of RoPE is divided by in long sequences. Below d_rcd a shape, from d_rcd on the "
        "search; d_tcd is where theory puts the critical dimension, s the extension ratio.",
        svgs=(("", plot.render()),),
        columns=("dimension", *series),
        rows=[[i, *(values[i] for values in series.values())] for i in range(spec.num_dims)],
        draw=partial(figures.draw_factors, {**drawn, found.method: found}),
    )


def _convergence(data: Data) -> Chart | None:
    whole = (data["search"] or {}).get("convergence", [])
    # Perplexities of other lengths cannot be compared with the closed forms.
    history = [entry for entry in whole if entry["length"] == whole[-1]["length"]]
    points = [(entry["iteration"], entry["perplexity"]) for entry in history if entry["perplexity"] is not None]
    if not points:
        return None
    measured = [row for row in data["search"]["scores"] if row["method"] in data["closed_forms"]]
    levels = {row["method"]: row["perplexity"] for row in measured if row["perplexity"] is not None}
    low = min(value for _, value in points)
    high = max([value for _, value in points] + list(levels.values()))
    plot = Plot.over(
        "Search: best needle perplexity by iteration",
        (0, max(points[-1][0], 1)),
        (low * 0.97, max(high * 1.1, low * 1.2)),
        y_kind="log",
        whole=True,
        x_label="iteration",
        y_label="needle perplexity",
    )
    for name, value in levels.items():
        plot.level(value, f"{label(name)} {number(value)}")
    tips = [
        f"iteration {entry['iteration']}: {number(entry['perplexity'])}, d_rcd {entry['critical_dimension']}, "
        f"{entry['evaluations']:,} evaluations"
        for entry in history
        if entry["perplexity"] is not None
    ]
    plot.line(points, tips, series=ledger.AFTER_TRAINING, name="best candidate")
    columns = ("length", "iteration", "perplexity", "critical_dimension", "evaluations", "exhaustive_evaluations")
    result = data["search"]
    return Chart(
        name="convergence",
        title="Search",
        caption=f"{result['document_evaluations']:,} document evaluations; without racing it would have been "
        f"{result['exhaustive_evaluations']:,}. Dotted: closed forms"
        f"{', on documents that were held out' if any(row['part'] == HELD_OUT for row in measured) else ''}.",
        svgs=(("", plot.render()),),
        columns=columns,
        rows=[[entry[column] for column in columns] for entry in whole],
        draw=partial(figures.draw_convergence, whole),
    )


def _losses(data: Data) -> Chart | None:
    log = data["log"]
    kinds = [kind for kind in ("short", "long") if any(f"loss_{kind}" in line for line in log)]
    if not kinds:
        return None
    by_kind = {kind: [(line["step"], line[f"loss_{kind}"]) for line in log if f"loss_{kind}" in line] for kind in kinds}
    values = [value for points in by_kind.values() for _, value in points]
    spread = max(max(values) - min(values), 0.1)
    plot = Plot.over(
        "Loss by step and kind of row",
        (1, max(log[-1]["step"], 2)),
        (min(values) - 0.05 * spread, max(values) + 0.05 * spread),
        whole=True,
        x_label="step",
        y_label="loss (nats per token)",
    )
    for kind, points in by_kind.items():
        tips = [f"step {step}, {kind} rows: {value:.4f}" for step, value in points]
        plot.line(points, tips, series=f"rows-{kind}", name=f"{kind} rows", dots=len(points) <= 60)
    which = "Short rows with the original RoPE, long rows with the rescaled one."
    if data["recipe"].get("train", {}).get("window") == "single":
        which = "All rows with the rescaled RoPE."
    columns = ("step", *(f"loss_{kind}" for kind in kinds), "loss", "learning_rate", "tokens", "seconds")
    return Chart(
        name="losses",
        title="Training",
        caption=f"{which} Rows differ, so single steps do.",
        svgs=(("", plot.render()),),
        columns=columns,
        rows=[[line.get(column) for column in columns] for line in log],
        draw=partial(figures.draw_losses, by_kind),
    )


def _by_length(data: Data) -> Iterator[Chart]:
    for suite in BY_LENGTH:
        series = {method: own for method, scores in data["scores"].items() if (own := overall(scores, suite))}
        if series:
            yield _scores(suite, series)


def _scores(suite: str, series: Mapping[str, Sequence[Data]]) -> Chart:
    lengths = sorted({score["length"] for scores in series.values() for score in scores})
    ends = (lengths[0] * 0.9, lengths[-1] * 1.1) if len(lengths) == 1 else (lengths[0], lengths[-1])
    plot = Plot.over(
        f"{TITLES[suite]}: score by length",
        ends,
        (-2, 102),
        x_kind="log",
        x_label="tokens",
        y_label="right answers (%)",
        x_ticks=[(length, length_label(length)) for length in lengths],
        y_ticks=[(value, str(value)) for value in range(0, 101, 20)],
    )
    for method, scores in series.items():
        for score in scores:
            plot.interval(score["length"], score["low"], score["high"], series=method)
        tips = [
            f"{label(method)}, {s['length']:,} tokens: {s['score']:.1f}% ({s['low']:.1f}–{s['high']:.1f}%, "
            f"{s['samples']} samples)"
            for s in scores
        ]
        plot.line([(s["length"], s["score"]) for s in scores], tips, series=method, name=label(method))
    columns = ("length", "score", "low", "high", "samples")
    return Chart(
        name=f"{suite}-by-length",
        title=TITLES[suite],
        caption="Scores by length with 95% intervals.",
        svgs=(("", plot.render()),),
        columns=("method", *columns),
        rows=[[method, *(score[c] for c in columns)] for method, scores in series.items() for score in scores],
        draw=partial(figures.draw_by_length, {label(m): s for m, s in series.items()}, label=f"{TITLES[suite]} (%)"),
    )


def _heatmaps(data: Data) -> Chart | None:
    grids = data["grids"]
    if not grids:
        return None
    svgs, rows = [], []
    for method, grid in grids.items():
        depths = [f"{100 * depth:.0f}%" for depth in grid["depths"]]
        cells = [[cell["score"] for cell in row] for row in grid["cells"]]
        drawing = heatmap(f"Needles: {label(method)}", [length_label(n) for n in grid["lengths"]], depths, cells)
        svgs.append((label(method), drawing))
        rows += [
            [method, length, depth, cell["score"], cell["samples"]]
            for depth, row in zip(grid["depths"], grid["cells"], strict=True)
            for length, cell in zip(grid["lengths"], row, strict=True)
        ]
    return Chart(
        name="needles",
        title="Needles by length and depth",
        caption="Share of needles found (%). Depth 0% is the start of the text, 100% its end, before the question.",
        svgs=tuple(svgs),
        columns=("method", "length", "depth", "score", "samples"),
        rows=rows,
        draw=partial(figures.draw_heatmaps, {label(method): grid for method, grid in grids.items()}),
    )


def _retention(summary: Summary) -> Chart | None:
    names = {"perplexity_retention": "short perplexity", "short_retention": "short tasks"}
    values = [
        (method, key, found[key])
        for key in names
        for method, found in summary.methods.items()
        if found[key] is not None
    ]
    if not values:
        return None
    measures = list(dict.fromkeys(key for _, key, _ in values))
    low = max(0.0, math.floor(min(value for *_, value in values) / 10) * 10 - 10)
    high = max(102.0, 1.05 * max(value for *_, value in values))
    plot = Plot.over(
        "What is kept in the original window",
        (-0.6, len(values) - 0.4),
        (low, high),
        x_label="",
        y_label="% of the original",
        x_ticks=[
            (sum(places) / len(places), names[key])
            for key in measures
            if (places := [place for place, value in enumerate(values) if value[1] == key])
        ],
    )
    plot.level(100, "")
    for place, (method, key, value) in enumerate(values):
        tip = f"{label(method)}, {names[key]}: {value:.2f}% of the original"
        plot.bar(place, 0.7, value, tip, series=method, label=f"{value:.1f}")
    for method in dict.fromkeys(method for method, *_ in values):
        plot.name(method, label(method))
    return Chart(
        name="retention",
        title="Kept in the original window",
        caption=" ".join(KEPT[key] for key in measures),
        svgs=(("", plot.render()),),
        columns=("method", "measure", "percent"),
        rows=[[method, key, value] for method, key, value in values],
        draw=partial(
            figures.draw_bars, {f"{label(m)}, {names[key]}": v for m, key, v in values}, label="% of the original"
        ),
    )


def stage_seconds(data: Data) -> dict[str, float]:
    """Time of each stage, over its steps, as far as they are done."""
    seconds: dict[str, float] = {}
    for name, entry in data["steps"].items():
        stage = name.partition("/")[0]
        seconds[stage] = seconds.get(stage, 0.0) + entry["seconds"]
    return {stage: seconds[stage] for stage in ledger.STAGES if stage in seconds}


def _times(data: Data) -> Chart | None:
    seconds = {stage: value for stage, value in stage_seconds(data).items() if value > 0}
    if not seconds:
        return None
    plot = Plot.over(
        "Time by stage",
        (-0.6, len(seconds) - 0.4),
        (0, 1.12 * max(seconds.values())),
        x_label="",
        y_label="seconds",
        x_ticks=list(enumerate(seconds)),
    )
    for place, (stage, value) in enumerate(seconds.items()):
        plot.bar(place, 0.7, value, f"{stage}: {value:.1f} s", series="time", label=number(round(value, 1)))
    return Chart(
        name="time",
        title="Time by stage",
        caption="Wall-clock seconds of all sessions, but for those that were killed.",
        svgs=(("", plot.render()),),
        columns=("stage", "seconds"),
        rows=[[stage, value] for stage, value in seconds.items()],
        draw=partial(figures.draw_bars, seconds, label="seconds"),
    )
