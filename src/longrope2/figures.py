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
    """Best perplexity and its critical dimension by iteration."""
    with figure(path, 1, 2, (10, 3.6)) as axes:
        iterations = [entry["iteration"] for entry in history]
        left, right = axes[0]
        left.plot(iterations, [entry["perplexity"] for entry in history], color=COLOURS["longrope2"])
        left.set_xlabel("iteration")
        left.set_ylabel("best perplexity")
        left.set_yscale("log")
        right.step(
            iterations,
            [entry["critical_dimension"] for entry in history],
            where="post",
            color=COLOURS["longrope2"],
        )
        right.set_xlabel("iteration")
        right.set_ylabel("critical dimension of the best")


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
