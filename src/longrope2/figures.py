"""Every figure, drawn with matplotlib from plain JSON values, in one style."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longrope2.errors import LongRopeError, require
from longrope2.factors import RescaleFactors
from longrope2.files import atomic_path

# Colour-blind safe (Okabe–Ito); a method keeps its colour in every figure.
COLOURS = {
    "pi": "#E69F00",
    "ntk": "#56B4E9",
    "yarn": "#009E73",
    "llama3": "#CC79A7",
    "longrope": "#D55E00",
    "longrope2": "#0072B2",
}
SEEN, UNSEEN = "#0072B2", "#D55E00"
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "figure.dpi": 150,
    "svg.fonttype": "none",
}


@contextmanager
def figure(path: Path, rows: int, columns: int, size: tuple[float, float]) -> Iterator[Any]:
    """Yield the axes [row][column] of a new figure, and save it atomically when the block ends."""
    matplotlib = require("matplotlib", extra="report", purpose="drawing a figure")
    require("matplotlib.figure", extra="report", purpose="drawing a figure")
    with matplotlib.rc_context(STYLE):
        drawing = matplotlib.figure.Figure(figsize=size, layout="constrained")
        if path.suffix.lstrip(".") not in drawing.canvas.get_supported_filetypes():
            raise LongRopeError(
                f"{path}: cannot draw into a file that ends in {path.suffix!r}", hint="use .png, .pdf or .svg"
            )
        yield drawing.subplots(rows, columns, squeeze=False)
        with atomic_path(path) as temporary:
            drawing.savefig(temporary)


def draw_inspection(result: dict[str, Any], path: Path) -> None:
    """The paper's first figure for this model: unseen angles by dimension, and factors by method."""
    with figure(path, 1, 2, (11, 4.2)) as axes:
        _draw_unseen(axes[0][0], result)
        closed = {name: factors for name, factors in result["methods"].items() if name != "longrope2"}
        _draw_factors(axes[0][1], {**result, "methods": closed})


def _draw_unseen(axis: Any, result: dict[str, Any]) -> None:
    """cos(p·θ_i) up to the target for a few dimensions; red where training never reached the angle."""
    window, target, periods = result["original_length"], result["target_length"], result["periods"]
    critical, half = result["critical_dimension"], len(result["periods"])
    shown = sorted({result["ten_period_dimension"], critical - 1, critical, (critical + half) // 2, half - 1})
    shown = [i for i in shown if 0 <= i < half]
    for row, i in enumerate(shown):
        unseen = result["first_unseen_position"][i]
        end = target if unseen is None else unseen
        for start, stop, colour in ((0, end, SEEN), (end, target, UNSEEN)):
            if stop <= start:
                continue
            # Enough points for the fastest curve shown, few enough for a small file.
            count = min(2000, max(50, int(40 * (stop - start) / periods[i])))
            positions = [start + (stop - start) * k / count for k in range(count + 1)]
            waves = [0.4 * math.cos(2 * math.pi * p / periods[i]) - row for p in positions]
            axis.plot(positions, waves, color=colour, linewidth=0.9)
    axis.axvline(window, color="black", linestyle="--", linewidth=0.9)
    axis.annotate(" trained window", (window, 0.5), fontsize=8)
    axis.set_yticks([-row for row in range(len(shown))], [f"i = {i}" for i in shown])
    axis.set_xlabel("position")
    axis.set_title("cosine of RoPE dimensions; red: angles never trained")


def draw_factors(by_method: Mapping[str, RescaleFactors], path: Path) -> None:
    """λ by dimension of several sets of factors for one model (the paper's figure on scale factors)."""
    first = next(iter(by_method.values()))
    with figure(path, 1, 1, (6, 4.2)) as axes:
        result = {
            "methods": {name: factors.long for name, factors in by_method.items()},
            "original_length": first.original_length,
            "target_length": first.target_length,
            "extension_ratio": first.extension_ratio,
            "critical_dimension": first.spec.critical_dimension,
            "ten_period_dimension": first.spec.ten_period_dimension,
        }
        _draw_factors(axes[0][0], result)
        for name, factors in by_method.items():
            if factors.critical_dimension is not None and name.startswith("longrope"):
                c = factors.critical_dimension
                axes[0][0].plot(c, factors.long[c], "o", color=COLOURS[name], label=f"d_rcd = {c}")
        axes[0][0].legend(fontsize=8, loc="lower right")


def draw_convergence(history: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Best perplexity and its critical dimension by iteration, a line for each length."""
    with figure(path, 1, 2, (10, 3.6)) as axes:
        left, right = axes[0]
        lengths = list(dict.fromkeys(entry["length"] for entry in history))
        for number, length in enumerate(lengths, 1):
            part = [entry for entry in history if entry["length"] == length]
            iterations = [entry["iteration"] for entry in part]
            look = {"color": COLOURS["longrope2"], "alpha": number / len(lengths), "label": f"{length:,} tokens"}
            left.plot(iterations, [entry["perplexity"] for entry in part], **look)
            right.step(iterations, [entry["critical_dimension"] for entry in part], where="post", **look)
        left.set_xlabel("iteration")
        left.set_ylabel("best perplexity")
        left.set_yscale("log")
        right.set_xlabel("iteration")
        right.set_ylabel("critical dimension of the best")
        if len(lengths) > 1:
            left.legend(fontsize=8)


def draw_calibration(result: Mapping[str, Any], path: Path) -> None:
    """Needle answers under the original and the long RoPE by length, and the switch length they recommend."""
    points = result["points"]
    lengths = [point["length"] for point in points]
    colours = {"original": "black", "long": COLOURS["longrope2"]}
    with figure(path, 1, 2, (10, 3.8)) as axes:
        nll, exact = axes[0]
        for side, colour in colours.items():
            found = [point[side] for point in points]
            errors = [value["nll_error"] for value in found]
            means = [value["nll"] for value in found]
            nll.errorbar(lengths, means, errors, fmt="o-", markersize=3, color=colour, label=f"{side} RoPE")
            for key, line, what in (("exact", "o-", "all depths"), ("worst", "o:", "worst depth")):
                shares = [value[key] for value in found]
                exact.plot(lengths, shares, line, markersize=3, color=colour, label=f"{side}, {what}")
        for axis in axes[0]:
            axis.axvline(result["original_length"], color="grey", linewidth=0.9, linestyle="--", label="trained window")
            axis.axvline(result["switch_length"], color=UNSEEN, linewidth=1.2, label="recommended switch")
            same = {"color": UNSEEN, "alpha": 0.1, "linewidth": 0, "label": "as good within the error"}
            axis.axvspan(result["as_good_from"], result["as_good_to"], **same)
            axis.set_xlabel("tokens")
            axis.legend(fontsize=8)
        nll.set_ylabel("nats per answer token (± one standard error)")
        exact.set_ylabel("share of exact answers")
        exact.set_ylim(-0.03, 1.03)
        nll.set_title(f"{_literal(result['model'])}: where to switch")


def draw_by_length(series: Mapping[str, Sequence[Mapping[str, Any]]], path: Path, *, label: str) -> None:
    """Scores by length with their intervals, a line for each method (the paper's RULER table as a figure)."""
    with figure(path, 1, 1, (6, 4)) as axes:
        axis = axes[0][0]
        for name, scores in series.items():
            ordered = sorted(scores, key=lambda score: score["length"])
            lengths = [score["length"] for score in ordered]
            means = [score["score"] for score in ordered]
            reach = [
                [score["score"] - score["low"] for score in ordered],
                [score["high"] - score["score"] for score in ordered],
            ]
            style = {"fmt": "o-", "capsize": 3, "markersize": 4, "color": COLOURS.get(name)}
            axis.errorbar(lengths, means, reach, label=_literal(name), **style)
        ticks = sorted({score["length"] for scores in series.values() for score in scores})
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [length_label(length) for length in ticks])
        axis.minorticks_off()
        axis.set_ylim(-3, 103)
        axis.set_xlabel("tokens")
        axis.set_ylabel(label)
        axis.legend(fontsize=8)


def draw_heatmaps(grids: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Needle in a haystack as the paper draws it: depth by length, red to green, up to four methods side by side."""
    columns = len(grids) if len(grids) <= 4 else 3
    rows = math.ceil(len(grids) / columns)
    with figure(path, rows, columns, (1.5 + 4.2 * columns, 3.6 * rows)) as axes:
        places = [axis for row in axes for axis in row]
        for axis in places[len(grids) :]:
            axis.remove()
        for axis, (name, grid) in zip(places, grids.items(), strict=False):
            scores = [[cell["score"] for cell in row] for row in grid["cells"]]
            image = axis.imshow(scores, cmap="RdYlGn", vmin=0, vmax=100, aspect="auto")
            axis.set_xticks(range(len(grid["lengths"])), [length_label(length) for length in grid["lengths"]])
            axis.set_yticks(range(len(grid["depths"])), [f"{100 * depth:.0f}%" for depth in grid["depths"]])
            axis.set_xlabel("tokens")
            axis.set_title(_literal(name))
            axis.grid(visible=False)
            axis.set_xticks([edge + 0.5 for edge in range(len(grid["lengths"]) - 1)], minor=True)
            axis.set_yticks([edge + 0.5 for edge in range(len(grid["depths"]) - 1)], minor=True)
            axis.grid(which="minor", color="white", alpha=1.0, linewidth=0.8)
            axis.tick_params(which="minor", length=0)
        for row in axes:
            row[0].set_ylabel("depth of the needle")
        places[0].figure.colorbar(image, ax=places[: len(grids)], label="answers right (%)", fraction=0.05)


def draw_losses(by_kind: Mapping[str, Sequence[tuple[int, float]]], path: Path) -> None:
    """Loss by step, a line for each kind of row."""
    colours = {"short": "black", "long": COLOURS["longrope2"]}
    with figure(path, 1, 1, (6, 3.6)) as axes:
        for kind, points in by_kind.items():
            steps, losses = zip(*points, strict=True)
            axes[0][0].plot(steps, losses, label=f"{kind} rows", color=colours.get(kind))
        axes[0][0].set_xlabel("step")
        axes[0][0].set_ylabel("loss (nats per token)")
        axes[0][0].legend(fontsize=8)


def draw_bars(values: Mapping[str, float], path: Path, *, label: str) -> None:
    """Named values as bars, each with its number."""
    with figure(path, 1, 1, (6, 0.8 + 0.4 * len(values))) as axes:
        bars = axes[0][0].barh(list(values), list(values.values()), color=COLOURS["longrope2"])
        axes[0][0].bar_label(bars, fmt="%.1f", fontsize=8, padding=2)
        axes[0][0].invert_yaxis()
        axes[0][0].set_xlabel(label)


def length_label(length: int) -> str:
    """128k rather than 131072."""
    return f"{length >> 10}k" if length % 1024 == 0 else str(length)


def _literal(name: str) -> str:
    """A name as it is: between two dollar signs, matplotlib would read a formula."""
    return name.replace("$", r"\$")


def _draw_factors(axis: Any, result: Mapping[str, Any]) -> None:
    """λ by dimension for each method, beside the bound of the theory."""
    styles = {"ntk-rcd": ("ntk", "--"), "yarn-rcd": ("yarn", "--")}
    for name, factors in result["methods"].items():
        colour, line = styles.get(name, (name, "-"))
        if colour in COLOURS:
            axis.plot(factors, line, color=COLOURS[colour], label=name, linewidth=1.4)
    bound = result["extension_ratio"]
    axis.axhline(bound, color="grey", linewidth=0.8, linestyle=":")
    for key, label in (("ten_period_dimension", "ten periods"), ("critical_dimension", "critical")):
        axis.axvline(result[key], color="black", linewidth=0.8, linestyle="--")
        place = {"transform": axis.get_xaxis_transform(), "va": "top", "ha": "right", "rotation": 90}
        axis.text(result[key], 0.98, f"{label} ({result[key]})", fontsize=8, **place)
    axis.set_yscale("log", base=2)
    axis.set_ylim(0.95, 4 * bound)
    axis.set_xlabel("RoPE dimension i")
    axis.set_ylabel("factor λ")
    axis.set_title(f"factors for {result['original_length']:,} → {result['target_length']:,} tokens")
    axis.legend(fontsize=8, loc="lower right")
