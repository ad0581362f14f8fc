"""A line chart as inline SVG: readable axes, gaps where numbers are missing, colours by the page's style sheet."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

WIDTH: Final = 600
HEIGHT: Final = 260
LEFT: Final = 62
RIGHT: Final = 24
TOP: Final = 12
BOTTOM: Final = 34
_MOST_POINTS: Final = 600
"""Of one line: more would be finer than the screen."""

Point = tuple[float, float | None]


@dataclass(frozen=True)
class Line:
    """`colour`: number of one of the style sheet's. `dots`: points by themselves."""

    label: str
    points: Sequence[Point]
    colour: int
    dots: bool = False


@dataclass(frozen=True)
class Mark:
    """Something was told of step `x`."""

    x: float
    text: str
    colour: int


@dataclass(frozen=True)
class Chart:
    """`unit` stands beside the title. `zero`: the axis starts at 0. `marks` stand at the upper edge."""

    title: str
    unit: str
    lines: Sequence[Line]
    zero: bool = False
    marks: Sequence[Mark] = ()

    @property
    def empty(self) -> bool:
        return not any(value is not None for line in self.lines for _, value in line.points)


@dataclass(frozen=True)
class Axes:
    """From numbers to places on the drawing."""

    x: tuple[float, float]
    y: tuple[float, float]

    def across(self, x: float) -> float:
        first, last = self.x
        return LEFT + (WIDTH - LEFT - RIGHT) * ((x - first) / (last - first) if last > first else 0.5)

    def up(self, y: float) -> float:
        low, high = self.y
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - low) / (high - low)


def draw(chart: Chart, name: str) -> str:
    """The chart as an SVG element; `name` is unique on the page."""
    axes = axes_of(chart)
    scaffold = "".join(_grid(axes))
    # All bands lie under all lines.
    bands = "".join(_band(line, axes) for line in chart.lines if len(line.points) > _MOST_POINTS)
    drawn = "".join(part for line in chart.lines for part in _path(line, axes))
    marks = "".join(_mark(mark, axes) for mark in chart.marks)
    clip = (
        f'<clipPath id="{name}-clip"><rect x="{LEFT}" y="{TOP - 4}" width="{WIDTH - LEFT - RIGHT + 4}" '
        f'height="{HEIGHT - TOP - BOTTOM + 8}"/></clipPath>'
    )
    label = html.escape(f"{chart.title}, {chart.unit}" if chart.unit else chart.title)
    return (
        f'<svg id="{name}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{clip}{scaffold}'
        f'<g clip-path="url(#{name}-clip)">{bands}{drawn}</g>{marks}'
        f'<line class="cursor" x1="0" x2="0" y1="{TOP}" y2="{HEIGHT - BOTTOM}" visibility="hidden"/></svg>'
    )


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most `_MOST_POINTS`: means of neighbours where there are more. A gap stays where all are missing."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    found: list[Point] = []
    for group in _groups(points):
        known = [value for _, value in group if value is not None]
        found.append((_middle(group), sum(known) / len(known) if known else None))
    # The ends stay where they are: the drawing reaches from the first step to the last.
    return [(points[0][0], found[0][1]), *found[1:-1], (points[-1][0], found[-1][1])]


def _groups(points: Sequence[Point]) -> list[Sequence[Point]]:
    edges = [index * len(points) // _MOST_POINTS for index in range(_MOST_POINTS + 1)]
    return [points[start:stop] for start, stop in itertools.pairwise(edges)]


def _middle(group: Sequence[Point]) -> float:
    return group[len(group) // 2][0]


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers between `low` and `high`, about `count` of them: steps of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """A number for an axis: 1.5M, 20k, 0.25, 3e-05."""
    size = abs(value)
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (limit if letter != 'k' else 1e3):.4g}{letter}"
    return "0" if size < 1e-12 else f"{value:.4g}"


def axes_of(chart: Chart) -> Axes:
    steps = [x for line in chart.lines for x, _ in line.points]
    values = sorted(y for line in chart.lines for _, y in line.points if y is not None)
    low, high = values[0], values[-1]
    # A few numbers far out (a spike, a slow first step) would press all others flat: they leave the drawing.
    edge = values[int(0.99 * (len(values) - 1))]
    if high - edge > 2 * (edge - low) > 0:
        high = edge + 0.15 * (edge - low)
    if chart.zero:
        low = min(0.0, low)
    room = 0.06 * (high - low) or max(abs(high) * 0.05, 1e-9)
    return Axes((min(steps), max(steps)), (low if chart.zero and low == 0 else low - room, high + room))


def _grid(axes: Axes) -> list[str]:
    parts = []
    for value in ticks(*axes.y, 6):
        y = axes.up(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick y" x="{LEFT - 8}" y="{y + 4:.1f}">{short(value)}</text>')
    whole = sorted({round(value) for value in ticks(*axes.x, 6)})
    for value in whole:
        if not axes.x[0] <= value <= axes.x[1]:
            continue
        x = axes.across(value)
        parts.append(
            f'<line class="notch" x1="{x:.1f}" x2="{x:.1f}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM + 4}"/>'
        )
        parts.append(f'<text class="tick x" x="{x:.1f}" y="{HEIGHT - BOTTOM + 17}">{short(value)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>')
    parts.append(f'<text class="name" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}">step</text>')
    return parts


def _band(line: Line, axes: Axes) -> str:
    """From the least to the most of the numbers that a point of the line is the mean of."""
    upper, lower = [], []
    for group in _groups(line.points):
        known = [value for _, value in group if value is not None]
        if known:
            x = axes.across(_middle(group))
            upper.append(f"{x:.1f} {axes.up(max(known)):.1f}")
            lower.append(f"{x:.1f} {axes.up(min(known)):.1f}")
    return f'<path class="band c{line.colour}" d="M{"L".join([*upper, *reversed(lower)])}Z"/>' if upper else ""


def _mark(mark: Mark, axes: Axes) -> str:
    """A small triangle that points down at its step; what was told shows under the pointer."""
    x = axes.across(mark.x)
    corners = f"{x - 5:.1f},{TOP - 10} {x + 5:.1f},{TOP - 10} {x:.1f},{TOP - 2}"
    return f'<polygon class="mark c{mark.colour}" points="{corners}"><title>{html.escape(mark.text)}</title></polygon>'


def _path(line: Line, axes: Axes) -> list[str]:
    """Neighbours as one path; a point by itself as a dot."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, y in thinned(line.points):
        if y is None:
            pieces.append([])
        else:
            pieces[-1].append((axes.across(x), axes.up(y)))
    parts = []
    long = [piece for piece in pieces if len(piece) > 1 and not line.dots]
    if long:
        steps = "".join("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in piece) for piece in long)
        parts.append(f'<path class="line c{line.colour}" d="{steps}"/>')
    alone = [point for piece in pieces if len(piece) == 1 or line.dots for point in piece]
    return parts + [f'<circle class="dot c{line.colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in alone]
