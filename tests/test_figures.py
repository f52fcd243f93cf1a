"""Figures: marks lie where matplotlib drew them, names are text, heatmaps are readable without seeing colours."""

import itertools
import re
from xml.etree import ElementTree

import pytest

from longrope2.figures import (
    COLOURS,
    DARK,
    draw_bars,
    draw_by_length,
    draw_factors,
    draw_heatmaps,
    draw_losses,
    number,
    thinned,
)
from longrope2.methods import METHODS, rescale
from longrope2.records import Cell, Grid, Measured
from longrope2.report.summary import label
from longrope2.rope import RopeSpec


def grid(scores):
    cells = tuple(tuple(Cell(score=score, samples=1, low=0.0, high=100.0) for score in row) for row in scores)
    lengths = tuple(1024 << k for k in range(len(scores[0])))
    return Grid(lengths=lengths, depths=(0.0, 1.0)[: len(scores)], cells=cells)


def luminance(colour):
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_values_are_shown_where_they_are_drawn():
    """matplotlib's own places of the dots against those of the layer that shows values."""
    points = [(1, 3.5), (2, 2.0), (40, 2.5)]
    root = ElementTree.fromstring(draw_losses({"long": points}, None).svg("x"))
    marks = [
        [float(mark.get(start)) + float(mark.get(size)) / 2 for start, size in (("x", "width"), ("y", "height"))]
        for mark in root.findall(".//*[@class='marks']/rect")
    ]
    dots = [[float(dot.get("x")), float(dot.get("y"))] for dot in root.iter("use")]
    for mark in marks:
        assert min(abs(mark[0] - x) + abs(mark[1] - y) for x, y in dots) < 0.2
    assert len(marks) == len(points)


def test_bars_and_cells_are_shown_where_they_are_drawn():
    drawings = [
        draw_bars([("a", "b", 3.0), ("c", "d", 5.0)], None, label="s"),
        draw_heatmaps({"m": grid([[1, 99]])}, None),
    ]
    for drawing in drawings:
        root = ElementTree.fromstring(drawing.svg("x"))
        paths = [path.get("d") for path in root.iter("path")]
        boxes = [[float(v) for v in re.findall(r"[-\d.]+", d)] for d in paths if d.count("L") == 3]
        corners = {
            (round(min(b[::2])), round(min(b[1::2])), round(max(b[::2])), round(max(b[1::2])))
            for b in boxes
            if len(b) > 7
        }
        for mark in root.findall(".//*[@class='marks']/rect"):
            x, y, width, height = (float(mark.get(key)) for key in ("x", "y", "width", "height"))
            assert (round(x), round(y), round(x + width), round(y + height)) in corners


def test_a_name_is_text_and_no_formula_or_tag():
    name = "$x_1$ </title><script>alert(1)</script> & \"'"
    score = Measured(suite="s", task="t", length=1024, metric="m", score=50.0, low=40.0, high=60.0, samples=3)
    written = draw_by_length({name: [score]}, None, label="%").svg("x")
    root = ElementTree.fromstring(written)
    assert name in [text.text for text in root.iter("text")]
    assert root.find(".//rect/title").text == f"{name}, 1,024 tokens: 50.0% (40.0–60.0%, 3 samples)"
    assert "<script>" not in written


def test_heatmaps_are_read_without_colours():
    """Brightness alone orders the cells, each number stands out from its cell, and there is a scale."""
    scores = list(range(0, 101, 5))
    root = ElementTree.fromstring(draw_heatmaps({"m": grid([scores])}, None).svg("x"))
    styles = [path.get("style", "") for path in root.iter("path")]
    cells = [found[1] for style in styles if (found := re.match("fill: (#[0-9a-f]{6})$", style))]
    assert len(cells) == len(scores)
    assert all(luminance(one) < luminance(other) for one, other in itertools.pairwise(cells))
    texts = [text for text in root.iter("text") if "var(" not in text.get("style")]
    assert [text.text for text in texts] == [str(score) for score in scores]
    for cell, text in zip(cells, texts, strict=True):
        fill = re.search("fill: (#[0-9a-f]{6})", text.get("style"))
        assert contrast(cell, fill[1] if fill else "#000000") >= 4.5
    assert "answers right (%)" in [text.text for text in root.iter("text")]


def test_dark_colours_are_seen_on_a_dark_page():
    assert all(contrast(colour, "#15181b") >= 3 for name, colour in DARK.items() if name != "rule")


def test_thinned_values_keep_lows_and_highs():
    values = [k % 7 for k in range(1000)]
    values[333], values[777] = 50, -50
    kept = thinned(values, 100)
    assert len(kept) <= 100
    assert {333, 777} <= set(kept)
    assert kept == sorted(kept)
    assert thinned(values[:100], 100) == list(range(100))


def test_a_loss_that_is_no_number_is_left_out():
    drawing = draw_losses({"long": [(1, 3.0), (2, float("nan")), (3, 2.0)]}, None)
    assert [mark.x for mark in drawing.marks] == [1, 3]


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_the_same_figure_is_the_same_file(tmp_path, ending, monkeypatch):
    for place, epoch in (("one", "1"), ("two", "1000000000")):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", epoch)  # what would date a file otherwise
        draw_losses({"long": [(1, 3.0), (2, 2.0)]}, tmp_path / f"{place}.{ending}")
    assert (tmp_path / f"one.{ending}").read_bytes() == (tmp_path / f"two.{ending}").read_bytes()


def test_numbers_are_short():
    assert [number(v) for v in (None, 0, 1.00012, 12345.6, 1e-5, 2e9)] == [
        "overflow", "0", "1", "12,346", "1e-05", "2e+09",
    ]  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_no_method_flattens_the_others(name):
    """Also not one whose last dimensions do not rotate: its line leaves the figure at the top."""
    spec = RopeSpec(rotary_dim=64, theta=1e4, original_length=256)
    drawing = draw_factors({method: rescale(method, spec, 1024) for method in ("yarn", name)}, None)
    bottom, top = drawing.axes[0][0].get_ylim()
    assert bottom < 1
    assert 4 < top < 100


def test_dimensions_that_matter_are_named_in_the_legend():
    """A name beside its line was crossed by those of NTK."""
    spec = RopeSpec(rotary_dim=64, theta=1e4, original_length=256)
    found = {"YaRN": rescale("yarn", spec, 4096), "NTK": rescale("ntk", spec, 4096)}
    found["LongRoPE2"] = rescale("longrope2", spec, 4096, critical_dimension=10)
    axis = draw_factors(found, None).axes[0][0]
    assert not axis.texts
    names = axis.get_legend_handles_labels()[1]
    assert names[-3:] == ["d_rcd = 10", "d_tcd = 13", "ten periods = 5"]


def test_every_method_has_a_colour():
    assert {label(name).lower() for name in (*METHODS, "base", "longrope2-factors-only")} <= set(COLOURS)
