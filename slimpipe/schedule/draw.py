"""A timeline as a self-contained SVG: a row a rank, time to the right (in the manner of the papers' figures).

Colours and greys are chosen to read on GitHub's light and dark backgrounds alike: nothing is drawn behind the whole
picture, text outside boxes is mid-grey, and idle time is a translucent grey.
"""

from __future__ import annotations

import colorsys
from collections import defaultdict
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from slimpipe.schedule.action import Action, Op
from slimpipe.schedule.flow import Span
from slimpipe.schedule.plan import Shape
from slimpipe.schedule.timeline import Timeline

_GREY = "#7d8590"
_FONT = "ui-sans-serif,system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif"
_FORWARD_HUE, _BACKWARD_HUE, _VOCABULARY_HUE, _HELP_HUE = 212, 28, 130, 285
_COPIES = (
    (False, False, "#d6409f", "to host"),
    (True, False, "#12a594", "back"),
    (False, True, "#f3a4cf", "keys to host"),
    (True, True, "#8fdcd0", "keys back"),
)
"""(inward, keys, colour, name) of copies to the host and back: lines along the upper and the lower edge of a row."""
_LIGHTNESS = (0.38, 0.58, 0.48, 0.68)
"""By microbatch, repeating. Neighbours differ by more than those two apart."""
_ORANGE_LIFT = 0.06
"""Dark orange is brown: backwards are drawn this much lighter."""

_LEFT, _TOP, _ROW, _FOOT = 64, 44, 28, 58
_SMALLEST_ROW, _TALLEST_PLOT = 5, 640
_CHARACTER = 6.2
"""Width of a digit in a box, at 10 px."""


def draw_svg(timeline: Timeline, title: str | None = None, width: int = 1200) -> str:
    """The timeline as SVG text, `width` px wide.

    Forwards are blue and backwards orange, shaded by microbatch; boxes with room for it show the slice (the microbatch
    where n = 1), and with several chunks a letter for the chunk. Vocabulary passes that take time are green, with the
    pass's letter before the slice; idle ranks that help with others' attention are purple. Lines along a row's upper
    and lower edge are activations, or keys and values, on their way to the host and back. The caption gives shape,
    bubble and peak activation.
    """
    shape = timeline.shape
    row = max(_SMALLEST_ROW, min(_ROW, _TALLEST_PLOT // shape.p))
    plot = _Plot((width - _LEFT - 4) / (timeline.makespan or 1.0), row)
    height = _TOP + row * shape.p + _FOOT
    heading = title or f"{timeline.name} schedule"
    body = [
        _text(_LEFT, 26, heading, size=16, weight=600),
        f'<path fill="#8b949e" fill-opacity="0.22" d="{_idle(timeline, plot)}"/>',
        *_boxes(timeline, plot),
        *_copies(timeline, plot),
        *_labels(timeline, plot),
        *_legend(timeline, _TOP + row * shape.p + 22),
        _text(_LEFT, _TOP + row * shape.p + 46, _caption(timeline), size=13),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label={quoteattr(heading)} font-family="{_FONT}" fill="{_GREY}">\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


@dataclass(frozen=True)
class _Plot:
    scale: float
    row: int

    @property
    def gap(self) -> float:
        """Between rows, and half of it between boxes, so that boxes need no outline to tell them apart."""
        return 3.0 if self.row >= 20 else 1.0 if self.row >= 8 else 0.0

    def box(self, rank: int, start: float, end: float) -> tuple[float, float, float, float]:
        """x, y, width, height."""
        x = _LEFT + start * self.scale
        wide = (end - start) * self.scale
        inset = min(self.gap / 2, wide / 5)
        return x, _TOP + rank * self.row + self.gap / 2, wide - inset, self.row - self.gap


def _boxes(timeline: Timeline, plot: _Plot) -> list[str]:
    """One path and one group of labels for each colour."""
    paths: defaultdict[tuple[int, float], list[str]] = defaultdict(list)
    labels: defaultdict[tuple[int, float], list[str]] = defaultdict(list)
    for rank, spans in enumerate(timeline.spans):
        for span in spans:
            if span.end == span.start:
                continue
            box = plot.box(rank, span.start, span.end)
            paths[_colour(span)].append(_rectangle(*box))
            labels[_colour(span)].append(_label(span.action, box, timeline.shape))
    drawn = []
    for colour in sorted(paths):
        drawn.append(f'<path fill="{_hex(colour)}" d="{"".join(paths[colour])}"/>')
        texts = "".join(labels[colour])
        if texts:
            ink = "#ffffff" if colour[1] < 0.56 else "#10161d"
            drawn.append(f'<g fill="{ink}" font-size="10" text-anchor="middle">{texts}</g>')
    return drawn


def _copies(timeline: Timeline, plot: _Plot) -> list[str]:
    """One path a direction, and one more for keys and values."""
    drawn = []
    for inward, keys, colour, _ in _COPIES:
        path = ""
        for copy in timeline.copies:
            if (copy.inward, copy.keys) == (inward, keys) and copy.end > copy.start:
                x, y, wide, high = plot.box(copy.rank, copy.start, copy.end)
                line = min(3.0, high / 4)
                path += _rectangle(x, y + high - line if inward else y, wide, line)
        if path:
            drawn.append(f'<path fill="{colour}" d="{path}"/>')
    return drawn


def _label(action: Action, box: tuple[float, float, float, float], shape: Shape) -> str:
    x, y, wide, high = box
    text = str(action.unit.slice if shape.n > 1 else action.unit.microbatch)
    if action.op.is_vocabulary:
        text = action.op.value + text
    elif shape.v > 1 and action.unit.chunk < 26:
        text += "abcdefghijklmnopqrstuvwxyz"[action.unit.chunk]
    if high < 10 or wide < _CHARACTER * len(text) + 2:
        return ""
    return f'<text x="{_number(x + wide / 2)}" y="{_number(y + high / 2 + 3.5)}">{text}</text>'


def _idle(timeline: Timeline, plot: _Plot) -> str:
    return "".join(_rectangle(*plot.box(rank, 0.0, timeline.makespan)) for rank in range(timeline.shape.p))


def _labels(timeline: Timeline, plot: _Plot) -> list[str]:
    """Rank labels, thinned out where rows are lower than a line of text."""
    every = -(-13 // plot.row)
    return [
        _text(_LEFT - 8, _TOP + (rank + 0.5) * plot.row + 4, f"rank {rank}", size=12, anchor="end")
        for rank in range(0, timeline.shape.p, every)
    ]


def _legend(timeline: Timeline, y: float) -> list[str]:
    shades = min(timeline.shape.m, len(_LIGHTNESS))
    drawn = []
    x: float = _LEFT
    kinds = [("forward", _FORWARD_HUE, 70), ("backward", _BACKWARD_HUE, 70)]
    if any(span.action.op.is_help for spans in timeline.spans for span in spans):
        kinds.append(("help", _HELP_HUE, 44))
    if any(span.action.op.is_vocabulary and span.end > span.start for spans in timeline.spans for span in spans):
        kinds.append(("vocabulary passes", _VOCABULARY_HUE, 122))
    for word, hue, room in kinds:
        for microbatch in range(shades):
            colour = _hex(_shade(hue, microbatch))
            drawn.append(f'<path fill="{colour}" d="{_rectangle(x, y - 10, 13, 12)}"/>')
            x += 15
        drawn.append(_text(x + 4, y, word, size=12))
        x += room
    shown = {copy.keys for copy in timeline.copies}
    for _, keys, colour, word in _COPIES:
        if keys in shown:
            drawn.append(f'<path fill="{colour}" d="{_rectangle(x, y - 6, 13, 3)}"/>')
            drawn.append(_text(x + 19, y, word, size=12))
            x += 100 if keys else 68
    drawn.append(f'<path fill="#8b949e" fill-opacity="0.22" d="{_rectangle(x, y - 10, 13, 12)}"/>')
    drawn.append(_text(x + 19, y, "idle", size=12))
    notes = []
    if timeline.shape.m > 1:
        repeat = f" (repeating after {shades})" if timeline.shape.m > shades else ""
        notes.append(f"shade: microbatch 0 to {timeline.shape.m - 1}{repeat}")
    notes.append("number: slice" if timeline.shape.n > 1 else "number: microbatch")
    if timeline.shape.v > 1:
        notes.append("letter: chunk")
    drawn.append(_text(x + 62, y, "; ".join(notes), size=12))
    return drawn


def _caption(timeline: Timeline) -> str:
    shape = timeline.shape
    chunks = f"chunks v = {shape.v}, " if shape.v > 1 else ""
    return (
        f"Ranks p = {shape.p}, {chunks}slices n = {shape.n}, microbatches m = {shape.m}. "
        f"Bubble {100 * timeline.bubble_fraction:.1f} % of all rank time; "
        f"peak activation {timeline.peak_activation:.3f} of one microbatch's over all layers."
    )


def _colour(span: Span) -> tuple[int, float]:
    hues = {Op.FORWARD: _FORWARD_HUE, Op.BACKWARD: _BACKWARD_HUE}
    hue = _HELP_HUE if span.action.op.is_help else hues.get(span.action.op, _VOCABULARY_HUE)
    return _shade(hue, span.action.unit.microbatch)


def _shade(hue: int, microbatch: int) -> tuple[int, float]:
    lightness = _LIGHTNESS[microbatch % len(_LIGHTNESS)]
    return hue, lightness + _ORANGE_LIFT if hue == _BACKWARD_HUE else lightness


def _hex(colour: tuple[int, float]) -> str:
    hue, lightness = colour
    channels = colorsys.hls_to_rgb(hue / 360, lightness, 0.68)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)


def _rectangle(x: float, y: float, wide: float, high: float) -> str:
    return f"M{_number(x)} {_number(y)}h{_number(wide)}v{_number(high)}h{_number(-wide)}z"


def _text(x: float, y: float, text: str, size: int, weight: int = 400, anchor: str = "start") -> str:
    return (
        f'<text x="{_number(x)}" y="{_number(y)}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


def _number(value: float) -> str:
    """Two decimals, and none that say nothing."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
