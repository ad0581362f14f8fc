"""The loss curve of a run, drawn in the terminal: `python -m slimpipe.train.curve RUN`."""

from __future__ import annotations

import argparse
import io
import json
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

# A braille character is 2 x 4 dots; the bit of the dot at (x, y), y downwards.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BLANK = 0x2800
_LABEL = 8  # columns of the axis


def read_losses(metrics_path: Path) -> dict[int, float]:
    """Step -> loss, ascending. Where a resumed run wrote a step again, the later line counts."""
    losses: dict[int, float] = {}
    for line in metrics_path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # cut by a kill in mid-write
        if isinstance(row, dict) and isinstance(row.get("loss"), (int, float)) and math.isfinite(row["loss"]):
            losses[int(row["step"])] = float(row["loss"])
    return dict(sorted(losses.items()))


def render(metrics_path: Path, width: int = 80, height: int = 16) -> str:
    """The losses of `metrics_path` (a metrics.jsonl) as a chart of `width` x `height` characters, axes included."""
    losses = read_losses(metrics_path)
    if not losses:
        return f"no losses in {metrics_path}"
    columns, rows = max(width - _LABEL - 2, 4), max(height - 3, 2)
    steps = list(losses)
    drawn = _resample(list(losses.values()), 2 * columns)
    low, high = min(drawn), max(drawn)
    dots = _trace(drawn, 4 * rows)

    lines = [f"loss {losses[steps[0]]:.4g} -> {losses[steps[-1]]:.4g} (lowest {min(losses.values()):.4g})"]
    for row in range(rows):
        # The first, middle and last rows carry a number.
        value = high - (high - low) * row / (rows - 1)
        label = f"{value:{_LABEL}.3f}" if row in (0, rows // 2, rows - 1) else " " * _LABEL
        cells = (
            sum(_DOTS[x][y] for x in (0, 1) for y in range(4) if (2 * column + x, 4 * row + y) in dots)
            for column in range(columns)
        )
        axis = "┤" if label.strip() else "│"
        lines.append(f"{label} {axis}{''.join(chr(_BLANK + cell) for cell in cells)}".rstrip(chr(_BLANK)))
    lines.append(" " * (_LABEL + 1) + "└" + "─" * columns)
    first, last = f"step {steps[0]}", str(steps[-1])
    lines.append(" " * (_LABEL + 2) + first + last.rjust(columns - len(first)))
    return "\n".join(lines)


def _resample(values: Sequence[float], count: int) -> list[float]:
    """`values` at `count` evenly spaced places: means where there are more values than places, else interpolated."""
    if len(values) > count:
        edges = [i * len(values) // count for i in range(count + 1)]
        return [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    result = []
    for i in range(count):
        place = i * (len(values) - 1) / (count - 1)
        left = int(place)
        right = min(left + 1, len(values) - 1)
        result.append(values[left] + (values[right] - values[left]) * (place - left))
    return result


def _trace(values: Sequence[float], height: int) -> set[tuple[int, int]]:
    """Dots (x, y), y downwards, of a connected line through `values`, scaled to the height."""
    low, high = min(values), max(values)
    scale = (height - 1) / (high - low) if high > low else 0.0
    dots: set[tuple[int, int]] = set()
    previous = round((high - values[0]) * scale)
    for x, value in enumerate(values):
        y = round((high - value) * scale)
        # Down or up from beside where the line was, so that steep parts stay a line.
        beside = previous if y == previous else previous + (1 if y > previous else -1)
        dots.update((x, at) for at in range(min(y, beside), max(y, beside) + 1))
        previous = y
    return dots


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the curve of a run's folder or metrics file."""
    parser = argparse.ArgumentParser(prog="python -m slimpipe.train.curve", description=__doc__)
    parser.add_argument("run", type=Path, help="a run's folder (train.output) or its metrics.jsonl")
    options = parser.parse_args(arguments)
    path = options.run / "metrics.jsonl" if options.run.is_dir() else options.run
    if not path.exists():
        print(f"no such file: {path}", file=sys.stderr)
        return 1
    # The chart needs more than the encodings of some locales have.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    columns = shutil.get_terminal_size((80, 24)).columns
    print(render(path, min(columns, 100), 16))
    return 0


if __name__ == "__main__":
    sys.exit(main())
