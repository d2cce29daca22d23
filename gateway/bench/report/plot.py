"""Draw plots as inline SVG: axes, bars, curves and marks, without a library. Pure: numbers in, text out.

Every plot is a box of 400 x 220: about the width of a phone, and narrow enough for several side by side on a desktop.
Colours come from the page's style sheet by class, so that one drawing serves light and dark.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

WIDTH: Final = 400
HEIGHT: Final = 220
# Space for the widest label of an axis ("12.5 ms"), for a numbered mark above the plot, and for the labels below it.
LEFT: Final = 52
RIGHT: Final = 388
TOP: Final = 20
BOTTOM: Final = 194
# With this many ticks the labels do not touch.
_TICKS_ACROSS: Final = 5
_TICKS_UP: Final = 4
_LABEL_HEIGHT: Final = 12
# Right of this share of the axis a label would leave the box, so it goes to the left of its mark.
_TURN: Final = 0.75
_STEPS: Final = (1.0, 2.0, 5.0, 10.0)
_ENDS: Final = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of values: `low` < `high`, both above 0 if logarithmic. `format` writes a value for a person."""

    low: float
    high: float
    format: Callable[[float], str]
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """Return where `value` lies, from 0 at `low` to 1 at `high`; a value outside gets the nearer end."""
        if self.logarithmic:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(max(share, 0.0), 1.0)

    def ticks(self, most: int) -> list[float]:
        """Return about `most` round values within the axis.

        On a logarithmic one these are powers of ten: with 2 and 5 times each if there are few, or only some of many.
        """
        if not self.logarithmic:
            step = round_up((self.high - self.low) / most, _STEPS)
            first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
            return [count * step for count in range(first, last + 1)]
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        steps = (1.0, 2.0, 5.0) if last - first <= most / 2 else (1.0,)
        every = max(1, round((last - first) / most))
        values = [step * 10.0**power for power in range(first, last + 1, every) for step in steps]
        return [value for value in values if self.low * (1 - 1e-9) <= value <= self.high * (1 + 1e-9)]


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line at `at`. Its CSS class `kind` puts the label beside it (`quantile`) or above it (`event`)."""

    at: float
    label: str
    kind: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    """A curve through `points` (x, y) in order of x; it is interrupted where y is None."""

    points: Sequence[tuple[float, float | None]]
    kind: str
    filled: bool = False
    dotted: bool = False


def round_up(value: float, steps: Sequence[float] = _ENDS) -> float:
    """Round up to a number at which an axis can end; return 1 if `value` is not above 0."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next((step * power for step in steps if step * power >= value * (1 - 1e-9)), 10.0 * power)


def bars(name: str, x: Axis, y: Axis, edges: Sequence[float], counts: Sequence[int], marks: Iterable[Mark] = ()) -> str:
    """Draw a histogram: one column between each two of `edges`."""
    drawn = [
        _bar(x, y, (left, right), count)
        for (left, right), count in zip(pairwise(edges), counts, strict=True)
        if count > 0
    ]
    return _figure(name, x, y, drawn, marks)


def lines(
    name: str,
    x: Axis,
    y: Axis,
    drawn: Iterable[Curve],
    marks: Iterable[Mark] = (),
    notes: Iterable[tuple[float, float, str]] = (),
) -> str:
    """Draw curves. `notes` holds (from x, to x, text) for the tooltips."""
    parts = [part for line in drawn for part in _line(x, y, line)]
    return _figure(name, x, y, [*parts, *(_note(x, *note) for note in notes)], marks)


def _figure(name: str, x: Axis, y: Axis, drawn: Iterable[str], marks: Iterable[Mark]) -> str:
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(name)}">',
        *_grid(x, y),
        *drawn,
        *(part for row, mark in enumerate(marks) for part in _mark(x, mark, row)),
        "</svg>",
    ]
    return "".join(parts)


def _grid(x: Axis, y: Axis) -> Iterator[str]:
    for value in y.ticks(_TICKS_UP):
        at = _up(y, value)
        yield f'<path class="grid" d="M{LEFT} {at}H{RIGHT}"/>'
        yield f'<text class="label" x="{LEFT - 6}" y="{at + 4:g}" text-anchor="end">{escape(y.format(value))}</text>'
    yield f'<path class="axis" d="M{LEFT} {BOTTOM}H{RIGHT}"/>'
    for value in x.ticks(_TICKS_ACROSS):
        at = _across(x, value)
        yield f'<path class="axis" d="M{at} {BOTTOM}v4"/>'
        # The last label would leave the box if it were centred.
        anchor = f'x="{WIDTH - 2}" text-anchor="end"' if at > RIGHT - 8 else f'x="{at}" text-anchor="middle"'
        yield f'<text class="label" {anchor} y="{BOTTOM + 17}">{escape(x.format(value))}</text>'


def _bar(x: Axis, y: Axis, edges: tuple[float, float], count: int) -> str:
    left, right = (_across(x, edge) for edge in edges)
    top = _up(y, count)
    # One pixel between two columns, but no column narrower than half a pixel.
    width = max(round(right - left - 1, 1), 0.5)
    title = f"{x.format(edges[0])} to {x.format(edges[1])}: {y.format(count)}"
    box = f'x="{left}" y="{top}" width="{width}" height="{round(BOTTOM - top, 1)}"'
    return f'<rect class="bar" {box}><title>{escape(title)}</title></rect>'


def _line(x: Axis, y: Axis, line: Curve) -> Iterator[str]:
    for stretch in stretches(line.points):
        places = [(_across(x, at), _up(y, value)) for at, value in stretch]
        # A single point becomes a line to itself, which its round cap makes a dot.
        path = "L".join(f"{across} {up}" for across, up in (places if len(places) > 1 else places * 2))
        if line.filled:
            ends = places[0][0], places[-1][0]
            yield f'<path class="fill {line.kind}" d="M{ends[0]} {BOTTOM}L{path}L{ends[1]} {BOTTOM}Z"/>'
        yield f'<path class="line {line.kind}" d="M{path}"/>'
        if line.dotted:
            yield from (
                f'<circle class="dot {line.kind}" cx="{across}" cy="{up}" r="4">'
                f"<title>{escape(f'{x.format(at)}: {y.format(value)}')}</title></circle>"
                for (across, up), (at, value) in zip(places, stretch, strict=True)
            )


def stretches(points: Iterable[tuple[float, float | None]]) -> list[list[tuple[float, float]]]:
    """Split the points at those without a value."""
    found: list[list[tuple[float, float]]] = [[]]
    for at, value in points:
        if value is not None:
            found[-1].append((at, value))
        elif found[-1]:
            found.append([])
    return [stretch for stretch in found if stretch]


def _note(x: Axis, begin: float, end: float, text: str) -> str:
    left, right = _across(x, begin), _across(x, end)
    box = f'x="{left}" y="{TOP}" width="{round(right - left, 1)}" height="{BOTTOM - TOP}"'
    return f'<rect class="note" {box}><title>{escape(text)}</title></rect>'


def _mark(x: Axis, mark: Mark, row: int) -> Iterator[str]:
    at = _across(x, mark.at)
    yield f'<path class="{mark.kind}" d="M{at} {TOP}V{BOTTOM}"/>'
    if mark.kind == "event":
        yield f'<circle class="event" cx="{at}" cy="{TOP - 10}" r="8"><title>{escape(mark.title)}</title></circle>'
        yield f'<text class="event" x="{at}" y="{TOP - 6}" text-anchor="middle">{escape(mark.label)}</text>'
        return
    turned = x.share(mark.at) > _TURN
    at_label = f'x="{at + (-4 if turned else 4):g}" y="{TOP + 10 + row * _LABEL_HEIGHT}"'
    yield f'<text class="label" {at_label} text-anchor="{"end" if turned else "start"}">{escape(mark.label)}</text>'


def _across(x: Axis, value: float) -> float:
    return round(LEFT + x.share(value) * (RIGHT - LEFT), 1)


def _up(y: Axis, value: float) -> float:
    return round(BOTTOM - y.share(value) * (BOTTOM - TOP), 1)
