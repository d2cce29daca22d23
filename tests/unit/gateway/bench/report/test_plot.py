"""Axes, bars, curves and marks."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from gateway.bench.report import plot
from gateway.bench.report.plot import Axis, Curve, Mark, bars, lines, round_up, stretches


def axis(low: float, high: float, *, logarithmic: bool = False) -> Axis:
    return Axis(low, high, lambda value: f"{value:g}", logarithmic)


def parsed(svg: str) -> ET.Element:
    """Parse the SVG as a browser does; raise if it is not well formed."""
    return ET.fromstring(svg)


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in parsed(svg).iter("text")]


def drawn(svg: str, tag: str, kind: str) -> list[ET.Element]:
    return [element for element in parsed(svg).iter(tag) if kind in element.get("class", "").split()]


def test_places_on_an_axis() -> None:
    assert [axis(10, 20).share(value) for value in (10, 15, 20)] == [0, 0.5, 1]
    assert [axis(1, 100, logarithmic=True).share(value) for value in (1, 10, 100)] == [0, 0.5, 1]


def test_what_lies_outside_is_put_at_the_end() -> None:
    assert [axis(10, 20).share(value) for value in (5, 25)] == [0, 1]
    assert [axis(1, 10, logarithmic=True).share(value) for value in (0, 25)] == [0, 1]


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        (axis(0, 10), [0, 2, 4, 6, 8, 10]),
        (axis(0.3, 0.9), [0.4, 0.6, 0.8]),
        (axis(1, 100, logarithmic=True), [1, 2, 5, 10, 20, 50, 100]),
        (axis(0.001, 100, logarithmic=True), [0.001, 0.01, 0.1, 1, 10, 100]),
        (axis(1e-6, 1e6, logarithmic=True), [1e-6, 1e-4, 1e-2, 1, 100, 1e4, 1e6]),
    ],
)
def test_ticks_are_round_and_few(which: Axis, expected: list[float]) -> None:
    assert which.ticks(5) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "end"), [(0, 1), (-3, 1), (1, 1), (1.01, 1.2), (51, 60), (99, 100), (0.07, 0.08), (9.9999999999e3, 1e4)]
)
def test_an_axis_ends_at_a_round_number(value: float, end: float) -> None:
    assert round_up(value) == pytest.approx(end)


def test_bars_are_as_high_as_their_counts_and_none_is_drawn_for_nothing() -> None:
    svg = bars("n", axis(0, 3), axis(0, 10), [0, 1, 2, 3], [10, 0, 5])
    heights = [float(bar.get("height", "")) for bar in drawn(svg, "rect", "bar")]
    assert heights == [plot.BOTTOM - plot.TOP, (plot.BOTTOM - plot.TOP) / 2]
    assert "1 to 2" not in svg
    assert "2 to 3: 5" in svg


def test_a_quantile_is_marked_inside_and_an_event_above() -> None:
    marks = [Mark(5, "p50 5", "quantile"), Mark(9, "p99 9", "quantile"), Mark(2, "1", "event", "kill <worker>")]
    svg = bars("n", axis(0, 10), axis(0, 1), [0, 10], [1], marks)
    assert {"p50 5", "p99 9", "1"} <= set(texts(svg))
    assert [title.text for title in parsed(svg).iter("title")][-1] == "kill <worker>"
    labels = {element.text: element for element in parsed(svg).iter("text")}
    assert (labels["p50 5"].get("text-anchor"), labels["p99 9"].get("text-anchor")) == ("start", "end")
    assert labels["p50 5"].get("y") != labels["p99 9"].get("y")
    assert float(labels["1"].get("y", "")) < plot.TOP


def test_no_label_leaves_the_box() -> None:
    svg = lines("n", axis(0, 10), axis(0, 10), [Curve([(0, 0), (10, 10)], "s1")])
    ends = [element for element in parsed(svg).iter("text") if element.get("text-anchor") == "end"]
    assert "10" in {element.text for element in ends}


def test_a_line_is_interrupted_where_nothing_is_known() -> None:
    assert stretches([(0, None), (1, 5.0), (2, 6.0), (3, None), (4, None), (5, 1.0)]) == [
        [(1, 5.0), (2, 6.0)],
        [(5, 1.0)],
    ]
    svg = lines("n", axis(0, 5), axis(0, 10), [Curve([(0, 1.0), (1, None), (2, 2.0)], "s1", dotted=True)])
    assert len(drawn(svg, "path", "line")) == len(drawn(svg, "circle", "dot")) == 2


def test_a_filled_line_goes_down_to_the_axis_at_both_ends() -> None:
    svg = lines("n", axis(0, 1), axis(0, 1), [Curve([(0, 1.0), (1, 1.0)], "s1", filled=True)])
    [fill] = drawn(svg, "path", "fill")
    left, right, top, bottom = plot.LEFT, plot.RIGHT, plot.TOP, plot.BOTTOM
    assert fill.get("d") == f"M{left}.0 {bottom}L{left}.0 {top}.0L{right}.0 {top}.0L{right}.0 {bottom}Z"


def test_a_pointer_that_rests_is_told_the_value() -> None:
    svg = lines("n", axis(0, 4), axis(0, 1), [], notes=[(1, 2, "a & b")])
    [note] = drawn(svg, "rect", "note")
    assert [title.text for title in note] == ["a & b"]


def test_names_are_escaped() -> None:
    assert parsed(lines('<"&', axis(0, 1), axis(0, 1), [])).get("aria-label") == '<"&'
