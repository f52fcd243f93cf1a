"""A small SVG writer: axes, lines, bars and cells, each mark with the value it stands for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Literal

WIDTH, HEIGHT = 480, 300
"""User units; narrow enough that letters stay readable on a phone."""
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 14, 46
TICKS = 6


def element(name: str, content: str = "", /, **attributes: Any) -> str:
    """One element; `class_` is written class, other underscores as dashes, None leaves an attribute out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{written}>{content}</{name}>" if content else f"<{name}{written}/>"


def _text(value: Any) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Scale:
    """Values to places along an axis."""

    low: float
    high: float
    start: float
    stop: float
    kind: Literal["linear", "log"] = "linear"
    whole: bool = False
    """Whether only whole numbers mean something."""

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.kind == "log":
            value, low, high = math.log(value), math.log(low), math.log(high)
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Round values to write beside the axis."""
        if self.kind == "log":
            return _log_ticks(self.low, self.high)
        step = _round_step((self.high - self.low) / TICKS)
        step = max(step, 1) if self.whole else step
        first = math.ceil(self.low / step - 1e-9)
        return [round(step * k, 10) for k in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _round_step(rough: float) -> float:
    power = 10 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def _log_ticks(low: float, high: float) -> list[float]:
    for factors in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        ticks = [f * 10.0**p for p in range(first, last + 1) for f in factors if low <= f * 10.0**p <= high]
        if len(ticks) >= 3:
            return ticks[:: math.ceil(len(ticks) / TICKS)]
    step = _round_step((high - low) / TICKS)
    return [step * k for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def number(value: float | None) -> str:
    """A value as people read it: enough digits, never more."""
    if value is None:
        return "overflow"
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:.3g}"


@dataclass
class Plot:
    """One figure with axes; marks are added, then it is rendered."""

    title: str
    x: Scale
    y: Scale
    x_label: str
    y_label: str
    x_ticks: Sequence[tuple[float, str]] = ()
    """Places and words; none: round numbers."""
    y_ticks: Sequence[tuple[float, str]] = ()
    _marks: list[str] = field(default_factory=list)
    _legend: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def over(
        cls,
        title: str,
        xs: tuple[float, float],
        ys: tuple[float, float],
        *,
        x_kind: Literal["linear", "log"] = "linear",
        y_kind: Literal["linear", "log"] = "linear",
        whole: bool = False,
        **labels: Any,
    ) -> "Plot":
        """A plot of these ranges; `whole`: x counts something."""
        return cls(
            title=title,
            x=Scale(*xs, LEFT, WIDTH - RIGHT, x_kind, whole),
            y=Scale(*ys, HEIGHT - BOTTOM, TOP, y_kind),
            **labels,
        )

    def line(
        self,
        points: Sequence[tuple[float, float]],
        tips: Sequence[str],
        *,
        series: str,
        name: str,
        dots: bool = True,
    ) -> None:
        """A line through points, each of which tells its value."""
        places = " ".join(f"{self.x(x):.2f},{self.y(y):.2f}" for x, y in points)
        self._marks.append(element("polyline", points=places, class_=f"line s-{series}"))
        for (x, y), tip in zip(points, tips, strict=True):
            self._marks.append(
                element(
                    "circle",
                    element("title", escape(tip)),
                    cx=self.x(x),
                    cy=self.y(y),
                    r=3.2 if dots else 2.0,
                    class_=f"dot s-{series}",
                    data_series=series,
                    data_x=repr(x),
                    data_y=repr(y),
                )
            )
        self.name(series, name)

    def name(self, series: str, name: str) -> None:
        """Name a series below the plot."""
        self._legend.append((series, name))

    def interval(self, x: float, low: float, high: float, *, series: str) -> None:
        """How sure a point is."""
        place = self.x(x)
        self._marks.append(
            element("line", x1=place, x2=place, y1=self.y(low), y2=self.y(high), class_=f"interval s-{series}")
        )

    def bar(self, x: float, width: float, y: float, tip: str, *, series: str, label: str) -> None:
        """A bar from the bottom, centred on x, with its value written above it."""
        left, right, top = self.x(x - width / 2), self.x(x + width / 2), self.y(y)
        bottom = self.y(self.y.low)
        self._marks += [
            element(
                "rect",
                element("title", escape(tip)),
                x=left,
                y=min(top, bottom),
                width=right - left,
                height=abs(bottom - top),
                class_=f"bar s-{series}",
                data_series=series,
                data_y=repr(y),
            ),
            element("text", escape(label), x=(left + right) / 2, y=min(top, bottom) - 4, class_="value"),
        ]

    def upright(self, x: float, label: str) -> None:
        """A dashed line across the plot at x, named at its top."""
        place = self.x(x)
        self._marks.append(element("line", x1=place, x2=place, y1=TOP, y2=HEIGHT - BOTTOM, class_="guide"))
        spot = f"translate({place - 4:.2f} {TOP + 4}) rotate(-90)"
        self._marks.append(element("text", escape(label), transform=spot, class_="note end"))

    def level(self, y: float, label: str) -> None:
        """A dotted line across the plot at y, named at its right end."""
        place = self.y(y)
        self._marks.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=place, y2=place, class_="guide dotted"))
        self._marks.append(element("text", escape(label), x=WIDTH - RIGHT, y=place - 4, class_="note end"))

    def render(self) -> str:
        """The figure as an SVG element."""
        parts = [element("title", escape(self.title)), *self._axes(), *self._marks, *self._legend_marks()]
        rows = math.ceil(len(self._legend) / 2)
        height = HEIGHT + 20 * rows
        return element("svg", "".join(parts), viewBox=f"0 0 {WIDTH} {height}", role="img", class_="plot")

    def _axes(self) -> list[str]:
        bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        parts = []
        for value, text in self.x_ticks or [(tick, number(tick)) for tick in self.x.ticks()]:
            place = self.x(value)
            parts.append(element("line", x1=place, x2=place, y1=TOP, y2=bottom, class_="grid"))
            parts.append(element("text", escape(text), x=place, y=bottom + 16, class_="tick middle"))
        for value, text in self.y_ticks or [(tick, number(tick)) for tick in self.y.ticks()]:
            place = self.y(value)
            parts.append(element("line", x1=LEFT, x2=right, y1=place, y2=place, class_="grid"))
            parts.append(element("text", escape(text), x=LEFT - 6, y=place + 4, class_="tick end"))
        parts.append(element("path", d=f"M{LEFT} {TOP}V{bottom}H{right}", class_="axis"))
        parts.append(element("text", escape(self.x_label), x=(LEFT + right) / 2, y=bottom + 34, class_="name middle"))
        spot = f"translate(13 {(TOP + bottom) / 2:.0f}) rotate(-90)"
        parts.append(element("text", escape(self.y_label), transform=spot, class_="name middle"))
        return parts

    def _legend_marks(self) -> list[str]:
        parts = []
        for place, (series, name) in enumerate(self._legend):
            x, y = LEFT + (place % 2) * (WIDTH - LEFT) / 2, HEIGHT + 6 + 20 * (place // 2)
            parts.append(element("line", x1=x, x2=x + 20, y1=y, y2=y, class_=f"line s-{series}"))
            parts.append(element("text", escape(name), x=x + 26, y=y + 4, class_="legend"))
        return parts


def heatmap(title: str, columns: Sequence[str], rows: Sequence[str], cells: Sequence[Sequence[float]]) -> str:
    """Scores from 0 to 100 as coloured cells with their values, columns by rows."""
    left, top, width, height = 44, 8, 46, 22
    parts = [element("title", escape(title))]
    for row, (name, scores) in enumerate(zip(rows, cells, strict=True)):
        y = top + row * height
        parts.append(element("text", escape(name), x=left - 6, y=y + 15, class_="tick end"))
        for column, score in enumerate(scores):
            x = left + column * width
            tip = f"{columns[column]} tokens, depth {name}: {number(score)}%"
            parts.append(
                element(
                    "rect",
                    element("title", escape(tip)),
                    x=x,
                    y=y,
                    width=width - 1,
                    height=height - 1,
                    fill=f"hsl({1.2 * score:.0f} 60% 45%)",
                    class_="cell",
                    data_y=repr(score),
                )
            )
            parts.append(element("text", f"{score:.0f}", x=x + width / 2, y=y + 15, class_="in-cell"))
    bottom = top + len(rows) * height
    for column, name in enumerate(columns):
        parts.append(
            element("text", escape(name), x=left + (column + 0.5) * width, y=bottom + 15, class_="tick middle")
        )
    wide, high = left + len(columns) * width + 4, bottom + 22
    return element(
        "svg", "".join(parts), viewBox=f"0 0 {wide} {high}", width=wide, height=high, role="img", class_="heatmap"
    )
