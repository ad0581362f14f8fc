"""MFU and memory against context, as SVG for the README: `python -m benchmarks.peers --table` writes them."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.rows import SYSTEMS, Row, best
from slimpipe.report.chart import ticks

WIDTH, HEIGHT = 780, 360
LEFT, RIGHT, TOP, BOTTOM = 58, 204, 44, 46
EDGE = 26
"""Room beside the first and last context."""
KIB = 1024
CAPACITY = 143771 / 1024
"""GiB of an H200."""
# One hue a family; the interleaved schedule of a family is drawn through, plain 1F1B dashed.
LOOKS: Mapping[str, tuple[str, str]] = {
    "slimpipe": ("#1f5fd0", ""),
    "FSDP2 + CP": ("#d9730d", ""),
    "megatron interleaved": ("#2e8b57", ""),
    "megatron 1F1B": ("#2e8b57", "6 4"),
    "torch interleaved": ("#8e4fb8", ""),
    "torch 1F1B": ("#8e4fb8", "6 4"),
}


@dataclass(frozen=True)
class Series:
    """`points`: (tokens, value); `failed`: tokens at which no setting fit into memory."""

    system: str
    points: Sequence[tuple[int, float]]
    failed: Sequence[int] = ()


@dataclass(frozen=True)
class Picture:
    """`limit`: a line across, with its name."""

    title: str
    unit: str
    series: Sequence[Series]
    limit: tuple[float, str] | None = None


@dataclass(frozen=True)
class Axes:
    """From tokens (logarithmic) and values (from 0) to places on the drawing."""

    first: int
    last: int
    top: float

    def across(self, length: float) -> float:
        low, high = math.log2(self.first), math.log2(self.last)
        share = (math.log2(length) - low) / (high - low) if high > low else 0.5
        return LEFT + EDGE + (WIDTH - LEFT - RIGHT - 2 * EDGE) * share

    def up(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / self.top


def mfu(rows: Sequence[Row], layers: int = 16) -> Picture:
    """Every system's fastest setting; a cross where none fit."""
    found = {place: systems for place, systems in best(rows).items() if place[0] == layers and place[2] == "fast"}
    series = []
    for system in SYSTEMS:
        held = {length: systems[system] for (_, length, _), systems in found.items() if system in systems}
        points = [(length, 100 * row["mfu"]) for length, row in held.items() if not row.get("failed")]
        failed = [length for length, row in held.items() if row.get("out_of_memory")]
        series.append(Series(system, points, failed))
    return Picture("MFU of each system's best setting", "%", [one for one in series if one.points or one.failed])


def memory(rows: Sequence[Row], layers: int = 16) -> Picture:
    """The least that any setting of a system took on its fuller rank; a cross where none fit."""
    series = []
    for system in SYSTEMS:
        mine = [row for row in rows if (row["system"], row["layers"], row["link"]) == (system, layers, "fast")]
        least: dict[int, float] = {}
        for row in mine:
            if not row.get("failed"):
                peak = max(float(one) for one in row["peak_gib_by_rank"].split())
                least[row["length"]] = min(peak, least.get(row["length"], math.inf))
        over = sorted({row["length"] for row in mine if row.get("out_of_memory")} - set(least))
        # Beyond the first failure there is nothing to learn.
        failed = [length for length in over if length > max(least, default=0)][:1]
        series.append(Series(system, sorted(least.items()), failed))
    shown = [one for one in series if one.points or one.failed]
    return Picture("Least peak memory of the fuller rank", "GiB", shown, (CAPACITY, "an H200 has"))


def draw(picture: Picture) -> str:
    """The picture as an SVG file's text."""
    lengths = [length for one in picture.series for length in (*(x for x, _ in one.points), *one.failed)]
    values = [y for one in picture.series for _, y in one.points]
    top = 1.08 * max([*values, picture.limit[0] if picture.limit else 0.0])
    axes = Axes(min(lengths), max(lengths), top)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#333">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="22" font-size="15" font-weight="600">{html.escape(picture.title)}, {picture.unit}</text>',
    ]
    for value in ticks(0, top, 6):
        y = axes.up(value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for length in sorted(set(lengths)):
        x = axes.across(length)
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{length // KIB}K</text>'
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM + 4}" stroke="#888"/>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle">tokens a sequence</text>')
    if picture.limit:
        y = axes.up(picture.limit[0])
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#b00" stroke-width="1"/>'
        )
        text = f"{picture.limit[1]} {picture.limit[0]:.0f}"
        parts.append(f'<text x="{LEFT + 6}" y="{y - 5:.1f}" fill="#b00">{html.escape(text)}</text>')
    for one in reversed(picture.series):  # slimpipe lies over the others
        parts += _line(one, axes)
    # Below the limit, or at the foot where there is none.
    parts += _crosses(picture.series, axes, axes.up(picture.limit[0]) + 14 if picture.limit else axes.up(0) - 14)
    parts += _legend(picture.series)
    return "\n".join([*parts, "</svg>\n"])


def _line(one: Series, axes: Axes) -> list[str]:
    colour, dashes = LOOKS[one.system]
    width = 3 if one.system == "slimpipe" else 2
    places = [(axes.across(x), axes.up(y)) for x, y in one.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    # A dashed system may have one point alone: its dots are rings.
    fill = "white" if dashes else colour
    dots = [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{fill}" stroke="{colour}" stroke-width="2"/>'
        for x, y in places
    ]
    return [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dashed}/>', *dots]


def _crosses(series: Sequence[Series], axes: Axes, y: float) -> list[str]:
    """Side by side where several systems fail at one length."""
    parts = []
    for length in sorted({length for one in series for length in one.failed}):
        here = [one.system for one in series if length in one.failed]
        for place, system in enumerate(here):
            x = axes.across(length) + 13 * (place - (len(here) - 1) / 2)
            parts.append(
                f'<path d="M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10" stroke="{LOOKS[system][0]}" '
                f'stroke-width="2.5" fill="none"><title>{html.escape(system)}: out of memory</title></path>'
            )
    return parts


def _legend(series: Sequence[Series]) -> list[str]:
    parts = []
    x = WIDTH - RIGHT + 34
    for place, one in enumerate(series):
        colour, dashes = LOOKS[one.system]
        y = TOP + 14 + 22 * place
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        parts.append(f'<line x1="{x}" x2="{x + 24}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="3"{dashed}/>')
        parts.append(f'<text x="{x + 31}" y="{y + 4}">{html.escape(one.system)}</text>')
    if any(one.failed for one in series):
        y = TOP + 14 + 22 * len(series)
        parts.append(f'<path d="M{x + 7} {y - 5}l10 10m0 -10l-10 10" stroke="#555" stroke-width="2.5" fill="none"/>')
        parts.append(f'<text x="{x + 31}" y="{y + 4}">out of memory</text>')
    return parts


def write(rows: Sequence[Row], folder: Path) -> list[Path]:
    """peers_mfu.svg and peers_memory.svg in `folder`, where there is something to draw."""
    written = []
    for name, picture in (("mfu", mfu(rows)), ("memory", memory(rows))):
        if picture.series and any(one.points for one in picture.series):
            path = folder / f"peers_{name}.svg"
            path.write_text(draw(picture), encoding="utf-8")
            written.append(path)
    return written
