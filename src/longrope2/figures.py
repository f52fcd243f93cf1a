"""Every figure, described once: drawn by matplotlib into a file, and as SVG that shows the value of each mark."""

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.etree import ElementTree

from longrope2.errors import LongRopeError, counted, require
from longrope2.factors import RescaleFactors
from longrope2.files import atomic_path
from longrope2.records import CalibrationRecord, Grid, Measured, SearchIteration

if TYPE_CHECKING:
    from longrope2.inspection import Inspection

# Files have these colours; a page has them as CSS variables, to which its dark form gives other values.
LIGHT = {
    "ink": "#1c2024", "quiet": "#687078", "rule": "#d8dde2",
    # Colour-blind safe: Okabe and Ito's, then Tol's.
    "orange": "#e69f00", "sky": "#56b4e9", "green": "#009e73", "pink": "#cc79a7", "red": "#d55e00", "blue": "#0072b2",
    "wine": "#882255", "olive": "#999933", "teal": "#44aa99",
}  # fmt: skip
DARK = LIGHT | {
    "ink": "#e8eaed", "quiet": "#9aa3ab", "rule": "#3a4147", "sky": "#9ad6f7", "blue": "#3596dc", "wine": "#c9678f",
}  # fmt: skip
INK, QUIET, RULE, *SERIES = LIGHT.values()
ORANGE, SKY, GREEN, PINK, RED, BLUE, WINE, OLIVE, TEAL = SERIES
# By name in lower case: a method keeps its colour in every figure.
COLOURS = {
    "original": QUIET, "none": INK, "pi": ORANGE, "ntk": SKY, "ntk-rcd": SKY, "yarn": GREEN, "yarn-rcd": GREEN,
    "llama3": PINK, "ntk-aware": WINE, "dynamic-ntk": OLIVE, "ntk-by-parts": TEAL, "longrope": RED,
    "mrrope-uni": TEAL, "mrrope-pro": TEAL, "cope": WINE, "hardclip": OLIVE, "drope": OLIVE,
    "longrope2": BLUE, "longrope2, trained": BLUE, "longrope2, factors only": PINK,
    "short rows": QUIET, "long rows": BLUE,
}  # fmt: skip
VARIABLES = {colour: f"var(--{name})" for name, colour in LIGHT.items()}
HEATMAP = "viridis"
STYLE = {
    "font.size": 9,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": QUIET,
    "axes.titlesize": "medium",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.4,
    "lines.markersize": 3,
    "figure.dpi": 72,  # as in SVG, so that places are the same in both
    "svg.fonttype": "none",
    "svg.hashsalt": "longrope2",
}
ON_LINES = {"frameon": True, "facecolor": "white", "edgecolor": "none"}
"""A legend inside a figure that only files have."""
UNDATED = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
"""The same figure is the same file."""
FILE_DPI = 200
WIDTH = 5.0
"""Inches; narrow enough that letters stay readable on a phone."""
MOST_POINTS = 400
"""Of a line; a page of many steps stays small."""
MOST_DOTS = 70
HIGHEST = 8
"""Factors above this many s leave a figure at its top."""
INSPECTED = ("pi", "ntk", "yarn", "llama3", "ntk-rcd", "yarn-rcd")


class Mark(NamedTuple):
    """What stands for one value in a figure: a place, or a box."""

    axis: Any
    series: str
    x: float | str
    y: float
    tip: str
    corners: tuple[tuple[float, float], tuple[float, float]]
    radius: float = 0.0
    """How far around the corners the mark reaches, in points."""


class Drawing:
    """A matplotlib figure that knows which values its marks stand for."""

    def __init__(self, rows: int, columns: int, size: tuple[float, float], **subplots: Any) -> None:
        self.matplotlib = require("matplotlib", extra="report", purpose="drawing a figure")
        module = require("matplotlib.figure", extra="report", purpose="drawing a figure")
        with self.matplotlib.rc_context(STYLE):
            self.figure = module.Figure(figsize=size, layout="constrained")
            self.axes = self.figure.subplots(rows, columns, squeeze=False, **subplots)
        self.marks: list[Mark] = []

    def line(
        self,
        axis: Any,
        points: Sequence[tuple[float, float]],
        tips: Sequence[str],
        *,
        series: str,
        errors: tuple[Sequence[float], Sequence[float]] | None = None,
        **look: Any,
    ) -> None:
        """A line through points, each with the text to show for it; `errors` reach below and above."""
        kept = [place for place in thinned([y for _, y in points]) if math.isfinite(points[place][1])]
        xs, ys = [points[place][0] for place in kept], [points[place][1] for place in kept]
        few = len(kept) <= MOST_DOTS
        dash = "--" if series.lower().endswith("-rcd") else "-"
        colour = COLOURS.get(series.lower())
        look = {"color": colour, "label": series, "linestyle": dash, "marker": "o" if few else None, **look}
        if errors is not None:
            reach = [[side[place] for place in kept] for side in errors]
            axis.errorbar(xs, ys, reach, fmt="none", ecolor=look["color"], elinewidth=1, alpha=0.55)
        axis.plot(xs, ys, **look)
        for place, x, y in zip(kept, xs, ys, strict=True):
            self.marks.append(Mark(axis, series, x, y, tips[place], ((x, y), (x, y)), radius=5 if few else 2))

    def box(self, axis: Any, left: float, low: float, width: float, height: float, *, colour: Any, **mark: Any) -> None:
        """A bar or a cell."""
        axis.bar(left, height, width, low, color=colour, align="edge", linewidth=0)
        self.marks.append(Mark(axis=axis, corners=((left, low), (left + width, low + height)), **mark))

    def log_scale(self, axis: Any, base: int = 10) -> None:
        """A logarithmic y axis with numbers as people write them, enough of them even over less than a decade."""
        axis.set_yscale("log", base=base)
        low, high = axis.get_ylim()
        near, between = {2: (8, (1, 1.5)), 10: (100, (1, 2, 5))}[base]
        axis.yaxis.set_major_locator(self.matplotlib.ticker.LogLocator(base, between if high < near * low else (1,)))
        axis.yaxis.set_major_formatter(lambda value, _: number(value))
        axis.yaxis.set_minor_formatter(lambda value, _: "")

    def legend(self, columns: int = 3) -> None:
        """Names of the first panel's lines, below the figure."""
        handles, names = self.axes[0][0].get_legend_handles_labels()
        if handles:
            self.figure.legend(handles, names, loc="outside lower center", ncols=min(columns, len(names)))

    def save(self, path: Path) -> None:
        """Write a file of the type that its name ends in."""
        if path.suffix.lstrip(".") not in self.figure.canvas.get_supported_filetypes():
            raise LongRopeError(
                f"{path}: cannot draw into a file that ends in {path.suffix!r}", hint="use .png, .pdf or .svg"
            )
        with self.matplotlib.rc_context(STYLE), atomic_path(path) as temporary:
            self.figure.savefig(temporary, dpi=FILE_DPI, metadata=UNDATED.get(path.suffix))

    def svg(self, name: str) -> str:
        """An element for a page, with its own ids, CSS variables as colours, and a hover layer with each value."""
        written = io.BytesIO()
        with self.matplotlib.rc_context(STYLE):
            self.figure.savefig(written, format="svg", transparent=True, metadata=UNDATED[".svg"])
        root = ElementTree.fromstring(written.getvalue())  # noqa: S314 - written by matplotlib
        del root[:2]  # metadata, and a style that would reach beyond this figure
        for element in root.iter():
            element.tag = element.tag.rpartition("}")[2]
            found = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
            element.attrib = {key: _for_page(key, value, name) for key, value in found.items()}
        layer = ElementTree.SubElement(root, "g", {"class": "marks"})
        for mark in self.marks:
            if all(mark.axis.viewLim.contains(x, y) for x, y in mark.corners):
                layer.append(self._hover(mark))
        return ElementTree.tostring(root, encoding="unicode")

    def _hover(self, mark: Mark) -> ElementTree.Element:
        (left, bottom), (right, top) = mark.axis.transData.transform(mark.corners)
        left, right = sorted((left, right))
        bottom, top = sorted((bottom, top))
        height, around = 72 * self.figure.get_figheight(), mark.radius
        places = {"x": left - around, "y": height - top - around, "rx": around}
        places |= {"width": right - left + 2 * around, "height": top - bottom + 2 * around}
        values = {"data-series": mark.series, "data-x": mark.x, "data-y": mark.y}
        texts = {key: f"{value:.1f}" for key, value in places.items()} | {key: str(v) for key, v in values.items()}
        element = ElementTree.Element("rect", texts)
        ElementTree.SubElement(element, "title").text = mark.tip
        return element


def _for_page(key: str, value: str, name: str) -> str:
    """An SVG attribute, for use beside other figures in light and dark."""
    if key == "id":
        return f"{name}-{value}"
    if key == "style":
        value = re.sub("#[0-9a-f]{6}", lambda found: VARIABLES.get(found[0], found[0]), value)
    return re.sub(r"^#|(?<=url\()#", f"#{name}-", value)


@contextmanager
def figure(path: Path | None, rows: int, columns: int, size: tuple[float, float], **subplots: Any) -> Iterator[Drawing]:
    """Yield a new figure, its axes by row and column; save it when the block ends, if there is a path."""
    drawing = Drawing(rows, columns, size, **subplots)
    with drawing.matplotlib.rc_context(STYLE):
        yield drawing
    if path is not None:
        drawing.save(path)


def thinned(values: Sequence[float], most: int = MOST_POINTS) -> list[int]:
    """Places of about this many values that look like all of them: the lowest and the highest of each stretch."""
    if len(values) <= most:
        return list(range(len(values)))
    size = math.ceil(2 * len(values) / most)
    stretches = [range(start, min(start + size, len(values))) for start in range(0, len(values), size)]
    return sorted({choose(stretch, key=values.__getitem__) for stretch in stretches for choose in (min, max)})


def length_label(length: int) -> str:
    """128k rather than 131072."""
    return f"{length >> 10}k" if length % 1024 == 0 else str(length)


def number(value: float | None) -> str:
    """A value as people read it: enough digits, never more."""
    if value is None:
        return "overflow"
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:.3g}"


def draw_inspection(result: "Inspection", path: Path | None) -> Drawing:
    """The paper's first figure for this model: unseen angles by dimension, and factors by method."""
    with figure(path, 1, 2, (11, 4.2)) as drawing:
        left, right = drawing.axes[0]
        _draw_unseen(left, result)
        shown = [name for name in INSPECTED if name in result.methods]
        marks = [(result.critical_dimension, "d_tcd"), (result.ten_period_dimension, "ten periods")]
        if result.given:
            name, dimension = result.given
            shown.append(name)
            marks = [(dimension, "d_rcd"), *marks] if dimension is not None else marks
        _draw_factors(drawing, right, {n: result.methods[n] for n in shown}, result.extension_ratio, marks)
        right.set_title(f"factors for {result.original_length:,} → {result.target_length:,} tokens")
        right.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))  # inside, it would hide lines of small ratios
    return drawing


def _draw_unseen(axis: Any, result: "Inspection") -> None:
    """cos(p·θ_i) up to the target for a few dimensions; orange where training never reached the angle."""
    window, target, periods = result.original_length, result.target_length, result.periods
    critical, half = result.critical_dimension, len(result.periods)
    shown = sorted({result.ten_period_dimension, critical - 1, critical, (critical + half) // 2, half - 1})
    shown = [i for i in shown if 0 <= i < half]
    for row, i in enumerate(shown):
        unseen = result.first_unseen_position[i]
        end = target if unseen is None else unseen
        for start, stop, colour in ((0, end, BLUE), (end, target, RED)):
            if stop <= start:
                continue
            # Enough points for the fastest curve shown, few enough for a small file.
            count = min(2000, max(50, int(40 * (stop - start) / periods[i])))
            positions = [start + (stop - start) * k / count for k in range(count + 1)]
            waves = [0.4 * math.cos(2 * math.pi * p / periods[i]) - row for p in positions]
            axis.plot(positions, waves, color=colour, linewidth=0.9)
    axis.axvline(window, color=INK, linestyle="--", linewidth=0.9)
    axis.annotate(" trained window", (window, 0.5), fontsize=8)
    axis.set_yticks([-row for row in range(len(shown))], [f"i = {i}" for i in shown])
    axis.set_xlabel("position")
    axis.set_title("cosine of RoPE dimensions; orange: angles never trained")


def draw_factors(by_method: Mapping[str, RescaleFactors], path: Path | None) -> Drawing:
    """λ by dimension of several sets of factors for one model (the paper's figure on scale factors)."""
    first = next(iter(by_method.values()))
    marks = [(first.spec.critical_dimension, "d_tcd"), (first.spec.ten_period_dimension, "ten periods")]
    for name, factors in by_method.items():
        if factors.critical_dimension is not None and name.lower().startswith("longrope"):
            marks.insert(0, (factors.critical_dimension, "d_rcd"))
    with figure(path, 1, 1, (WIDTH, 3.6)) as drawing:
        series = {name: factors.long for name, factors in by_method.items()}
        _draw_factors(drawing, drawing.axes[0][0], series, first.extension_ratio, marks)
        drawing.legend()
    return drawing


def _draw_factors(
    drawing: Drawing,
    axis: Any,
    series: Mapping[str, Sequence[float]],
    ratio: float,
    marks: Sequence[tuple[int, str]],
) -> None:
    """λ by dimension for each method, beside the extension ratio and the dimensions that matter."""
    axis.axhline(ratio, color=QUIET, linewidth=0.9, linestyle=":", label=f"s = {ratio:g}")
    for name, values in series.items():
        tips = [f"{name}: λ_{i} = {value:.6g}" for i, value in enumerate(values)]
        drawing.line(axis, list(enumerate(values)), tips, series=name, marker=None)
    names: dict[int, str] = {}
    for place, name in marks:
        names[place] = f"{names[place]} = {name}" if place in names else name
    # Named in the legend: beside the lines, NTK's crosses their names wherever they stand.
    for (place, name), dashes in zip(names.items(), ("--", "-.", (0, (5, 1, 1, 1, 1, 1))), strict=False):
        axis.axvline(place, color=QUIET, linewidth=0.9, linestyle=dashes, label=f"{name} = {place}")
    low = 0.95 * min(1.0, *(min(values) for values in series.values()))
    # NTK's factors grow far beyond s, where none of the others go but those of dimensions that hardly rotate.
    usual = [value for name, values in series.items() if "ntk" not in name.lower() for value in values]
    high = 1.1 * max(ratio, *(value for value in usual if value < HIGHEST * ratio))
    axis.set_ylim(low, low * (high / low) ** 1.2)
    drawing.log_scale(axis, base=2)
    axis.set_xlabel("RoPE dimension i")
    axis.set_ylabel("factor λ")


def draw_convergence(
    history: Sequence[SearchIteration], path: Path | None, *, levels: Mapping[str, float] | None = None
) -> Drawing:
    """Best perplexity and its critical dimension by iteration, a line for each length.

    `levels` are the perplexities of closed forms at the last length.
    """
    lengths = list(dict.fromkeys(entry.length for entry in history))
    with figure(path, 2, 1, (WIDTH, 4.4), sharex=True, height_ratios=(5, 2)) as drawing:
        (above,), (below,) = drawing.axes
        for count, length in enumerate(lengths, 1):
            look: dict[str, Any] = {"color": BLUE, "alpha": count / len(lengths), "label": f"best at {length:,} tokens"}
            panels = ((above, "perplexity", "default"), (below, "critical_dimension", "steps-post"))
            for axis, key, style in panels:
                part = [entry for entry in history if entry.length == length and getattr(entry, key) is not None]
                points = [(entry.iteration, getattr(entry, key)) for entry in part]
                tips = [
                    f"{length:,} tokens, iteration {entry.iteration}: {number(entry.perplexity)}, "
                    f"d_rcd {entry.critical_dimension}, {counted(entry.evaluations, 'evaluation')}"
                    for entry in part
                ]
                drawing.line(axis, points, tips, series=f"{key}-{length}", drawstyle=style, **look)
        for name, value in (levels or {}).items():
            look = {
                "linestyle": "-." if name.lower().endswith("-rcd") else ":",
                "color": COLOURS.get(name.lower(), INK),
            }
            above.axhline(value, label=f"{name} {number(value)}", **look)
        drawing.log_scale(above)
        above.set_ylabel("perplexity")
        below.set_xlabel("iteration")
        below.set_ylabel("critical\ndimension")
        for axis in (below.xaxis, below.yaxis):
            axis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        drawing.legend(2)
    return drawing


def draw_calibration(result: CalibrationRecord, path: Path | None) -> Drawing:
    """Needle answers under the original and the long RoPE by length, and the switch length they recommend."""
    points = result.points
    with figure(path, 1, 2, (10, 4.4)) as drawing:
        nll, exact = drawing.axes[0]
        kinds = ((nll, "nll", "-", "RoPE"), (exact, "exact", "-", "all depths"), (exact, "worst", ":", "worst depth"))
        for side, colour in (("original", INK), ("long", BLUE)):
            for axis, key, dash, what in kinds:
                name = f"{side} {what}" if axis is nll else f"{side}, {what}"
                values = [(point.length, getattr(getattr(point, side), key)) for point in points]
                errors = [getattr(point, side).nll_error for point in points]
                tips = [f"{name}, {length:,} tokens: {number(value)}" for length, value in values]
                reach = (errors, errors) if axis is nll else None
                drawing.line(axis, values, tips, series=name, errors=reach, color=colour, linestyle=dash)
        for axis in (nll, exact):
            axis.axvline(result.original_length, color=QUIET, linewidth=0.9, linestyle="--", label="trained window")
            axis.axvline(result.switch_length, color=RED, linewidth=1.2, label="recommended switch")
            same = {"color": RED, "alpha": 0.1, "linewidth": 0, "label": "as good within the error"}
            axis.axvspan(result.as_good_from, result.as_good_to, **same)
            axis.set_xlabel("tokens")
            axis.legend(**ON_LINES)
        nll.set_ylabel("nats per answer token (± one standard error)")
        exact.set_ylabel("share of exact answers")
        exact.set_ylim(-0.03, 1.03)
        nll.set_title(f"{result.model}: where to switch")
    return drawing


def draw_by_length(series: Mapping[str, Sequence[Measured]], path: Path | None, *, label: str) -> Drawing:
    """Scores by length with their intervals, a line for each method (the paper's RULER table as a figure)."""
    known = {COLOURS.get(name.lower()) for name in series}
    spare = cycle([colour for colour in SERIES if colour not in known] or SERIES)
    with figure(path, 1, 1, (WIDTH, 3.6)) as drawing:
        axis = drawing.axes[0][0]
        for name, scores in series.items():
            ordered = sorted(((score.length or 0, score.percent) for score in scores), key=itemgetter(0))
            points = [(length, c.score) for length, c in ordered]
            tips = [
                f"{name}, {length:,} tokens: {c.score:.1f}% ({c.low:.1f}–{c.high:.1f}%, {counted(c.samples, 'sample')})"
                for length, c in ordered
            ]
            errors = [c.score - c.low for _, c in ordered], [c.high - c.score for _, c in ordered]
            colour = COLOURS.get(name.lower()) or next(spare)
            drawing.line(axis, points, tips, series=name, errors=errors, color=colour)
        ticks = sorted({score.length or 0 for scores in series.values() for score in scores})
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [length_label(length) for length in ticks])
        axis.minorticks_off()
        axis.set_ylim(-3, 103)
        axis.set_xlabel("tokens")
        axis.set_ylabel(label)
        drawing.legend(2)
    return drawing


def draw_heatmaps(grids: Mapping[str, Grid], path: Path | None) -> Drawing:
    """Needle in a haystack as the paper draws it, depth by length, up to four methods side by side."""
    columns = len(grids) if len(grids) <= 4 else 3
    rows = math.ceil(len(grids) / columns)
    across = max(len(grid.lengths) for grid in grids.values())
    down = max(len(grid.depths) for grid in grids.values())
    size = (0.7 + columns * max(0.6 + 0.42 * across, 1.9), rows * max(0.75 + 0.25 * down, 1.6))
    with figure(path, rows, columns, size) as drawing:
        places = [axis for row in drawing.axes for axis in row]
        for axis in places[len(grids) :]:
            axis.remove()
        scale = drawing.matplotlib.cm.ScalarMappable(drawing.matplotlib.colors.Normalize(0, 100), HEATMAP)
        bar = drawing.figure.colorbar(scale, ax=places[: len(grids)], label="answers right (%)", aspect=7 * size[1])
        bar.outline.set_visible(False)
        for axis, (name, grid) in zip(places, grids.items(), strict=False):
            for row, (depth, cells) in enumerate(zip(grid.depths, grid.cells, strict=True)):
                for column, (length, cell) in enumerate(zip(grid.lengths, cells, strict=True)):
                    score, colour = cell.score, scale.to_rgba(cell.score)
                    tip = f"{name}, {length:,} tokens, depth {100 * depth:.0f}%: {number(score)}%"
                    mark = {"series": name, "x": length, "y": score, "tip": tip}
                    drawing.box(axis, column - 0.48, row - 0.47, 0.96, 0.94, colour=colour, **mark)
                    look = {"ha": "center", "va": "center_baseline", "fontsize": 8, "color": _readable_on(colour)}
                    axis.text(column, row, f"{score:.0f}", in_layout=False, **look)
            axis.set_xticks(range(len(grid.lengths)), [length_label(length) for length in grid.lengths])
            axis.set_yticks(range(len(grid.depths)), [f"{100 * depth:.0f}%" for depth in grid.depths])
            axis.set_xlim(-0.5, len(grid.lengths) - 0.5)
            axis.set_ylim(len(grid.depths) - 0.5, -0.5)
            axis.tick_params(length=0)
            axis.grid(visible=False)
            axis.spines[:].set_visible(False)
            axis.set_xlabel("tokens")
            axis.set_title(name)
        for row in drawing.axes:
            row[0].set_ylabel("needle depth")
    return drawing


def _readable_on(colour: Sequence[float]) -> str:
    """Black or white, whichever has more contrast (by relative luminance, as in WCAG)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
    return "black" if sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True)) > 0.179 else "white"


def draw_losses(by_kind: Mapping[str, Sequence[tuple[int, float]]], path: Path | None) -> Drawing:
    """Loss by step, a line for each kind of row."""
    with figure(path, 1, 1, (WIDTH, 3.4)) as drawing:
        axis = drawing.axes[0][0]
        for kind, points in by_kind.items():
            tips = [f"step {step:,}, {kind} rows: {value:.4f}" for step, value in points]
            width = 1.4 if len(points) <= MOST_POINTS else 0.8
            drawing.line(axis, points, tips, series=f"{kind} rows", linewidth=width)
        axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axis.set_xlabel("step")
        axis.set_ylabel("loss (nats per token)")
        drawing.legend()
    return drawing


def draw_bars(
    bars: Sequence[tuple[str, str, float]], path: Path | None, *, label: str, reference: float | None = None
) -> Drawing:
    """Values as bars, each with its number: the series it belongs to, its name, and the value."""
    with figure(path, 1, 1, (WIDTH, 0.7 + 0.27 * len(bars))) as drawing:
        axis = drawing.axes[0][0]
        for row, (series, name, value) in enumerate(bars):
            mark = {"series": series, "x": name, "y": value, "tip": f"{name}: {value:,.2f} {label}"}
            drawing.box(axis, 0, row - 0.36, value, 0.72, colour=COLOURS.get(series.lower(), BLUE), **mark)
            look = {"xytext": (3, 0), "textcoords": "offset points", "va": "center_baseline", "fontsize": 8}
            axis.annotate(f"{value:,.1f}", (value, row), **look)
        if reference is not None:
            axis.axvline(reference, color=QUIET, linewidth=0.8, linestyle="--")
        axis.set_yticks(range(len(bars)), [name for _, name, _ in bars])
        axis.tick_params(axis="y", length=0, labelcolor=INK)
        axis.grid(visible=False, axis="y")
        axis.set_xlim(0, 1.12 * max(value for *_, value in bars))
        axis.set_ylim(len(bars) - 0.5, -0.5)
        axis.set_xlabel(label)
    return drawing
