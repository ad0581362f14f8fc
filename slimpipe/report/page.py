"""The page: a table of the runs, their charts, and what was told of their steps. No network, light and dark."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from importlib import resources
from typing import Final

from slimpipe.report.chart import LEFT, RIGHT, WIDTH, Chart, Line, Mark, Point, axes_of, draw, thinned
from slimpipe.report.runs import ReportError, Run, Series

COLOURS: Final = 8
_MOST_RANKS: Final = 8
"""With a line each; of more, the most and the least."""
_MOST_NOTES: Final = 200
GIB: Final = 2**30


def page(runs: Sequence[Run]) -> str:
    """One HTML document of one run, or of up to `COLOURS` laid over each other. Raises ReportError for more."""
    if len(runs) > COLOURS:
        raise ReportError(f"{len(runs)} runs: no more than {COLOURS} can be told apart; give fewer")
    shown = [chart for chart in _charts(runs) if not chart.empty]
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    steps = max(max(run.rows) for run in runs)
    figures = "\n".join(_figure(chart, f"chart{index}") for index, chart in enumerate(shown))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}: slimpipe</title>
<style>
{_file("style.css")}</style>
</head>
<body>
<h1>{html.escape(title)}</h1>
<p class="sub">{steps:,} steps; written {datetime.now().strftime("%Y-%m-%d %H:%M")}</p>
{_table(runs)}
<div class="charts">
{figures}
</div>
{_notes(runs)}
<script type="application/json" id="data">{_data(shown)}</script>
<script>
{_file("readout.js")}</script>
</body>
</html>
"""


def _charts(runs: Sequence[Run]) -> Iterator[Chart]:
    marks = [Mark(step, f"step {step}: {note}", index) for index, run in enumerate(runs) for step, note in run.notes()]
    yield Chart("Loss", "", [*_losses(runs)], marks=marks[:_MOST_NOTES])
    yield Chart("Throughput", "tokens/s", _overlaid(runs, "tokens_per_s"), zero=True)
    yield Chart("Memory", "GiB, peak so far", [*_by_rank(runs, "peak_memory_bytes", 1 / GIB)], zero=True)
    yield Chart("Idle share", "%, of a rank's time", [*_by_rank(runs, "bubble", 100.0)], zero=True)
    yield Chart("Model FLOP/s utilisation", "%", _overlaid(runs, "mfu", 100.0), zero=True)
    yield Chart("Gradient norm", "before clipping", _overlaid(runs, "grad_norm"))
    yield Chart("Learning rate", "", _overlaid(runs, "lr"), zero=True)


def _overlaid(runs: Sequence[Run], key: str, scale: float = 1.0) -> list[Line]:
    """A line a run."""
    return [Line(_label(runs, run), _points(run.series(key), scale), index) for index, run in enumerate(runs)]


def _losses(runs: Sequence[Run]) -> Iterator[Line]:
    evaluated = [run.series("eval_loss") for run in runs]
    if len(runs) == 1 and evaluated[0]:
        yield Line("training", _points(runs[0].series("loss"), 1.0), 0)
        yield Line("evaluation", _points(evaluated[0], 1.0), 1, dots=True)
        return
    yield from _overlaid(runs, "loss")
    for index, (run, series) in enumerate(zip(runs, evaluated, strict=True)):
        if series:
            yield Line(f"{run.name}, evaluation", _points(series, 1.0), index, dots=True)


def _by_rank(runs: Sequence[Run], key: str, scale: float) -> Iterator[Line]:
    """Of one run a line a rank; of several, a line a run: the fullest rank's memory, the mean idle share."""
    run, listed = runs[0], f"{key}_by_rank"
    ranks = run.ranks(listed)
    if len(runs) > 1 or ranks < 2:
        yield from _overlaid(runs, key, scale)
    elif ranks <= _MOST_RANKS:
        for rank in range(ranks):
            yield Line(f"rank {rank}", _points(run.series(listed, rank), scale), rank % COLOURS)
    else:
        for name, pick, colour in ((f"highest of {ranks} ranks", max, 0), ("lowest", min, 1)):
            series: Series = []
            for step, row in run.rows.items():
                numbers = [value for value in row.get(listed, []) if value is not None]
                series.append((step, pick(numbers) if numbers else None))
            yield Line(name, _points(series, scale), colour)


def _points(series: Series, scale: float) -> list[Point]:
    return [(step, None if value is None else value * scale) for step, value in series]


def _label(runs: Sequence[Run], run: Run) -> str:
    return "" if len(runs) == 1 else run.name


def _figure(chart: Chart, name: str) -> str:
    lines = [line for line in chart.lines if line.label]
    keys = "".join(
        f'<span><i class="key{" dots" if line.dots else ""} c{line.colour}"></i>{html.escape(line.label)}</span>'
        for line in lines
        if len(lines) > 1
    )
    unit = f'<span class="unit">{html.escape(chart.unit)}</span>' if chart.unit else ""
    return (
        f'<figure><figcaption><h2>{html.escape(chart.title)}</h2>{unit}<div class="legend">{keys}</div></figcaption>'
        f"{draw(chart, name)}</figure>"
    )


def _table(runs: Sequence[Run]) -> str:
    heads = ("run", "layout", "steps", "loss", "tokens/s", "MFU", "idle", "peak GiB", "skipped")
    head = "".join(f"<th{' class=text' if name == 'layout' else ''}>{name}</th>" for name in heads)
    rows = []
    for index, run in enumerate(runs):
        key = f'<i class="key c{index}"></i>' if len(runs) > 1 else ""
        peak = run.last("peak_memory_bytes")
        cells = (
            str(max(run.rows)),
            _shown(run.last("loss"), ".4f"),
            _shown(run.usual("tokens_per_s"), ",.0f"),
            _shown(run.usual("mfu"), ".1%"),
            _shown(run.usual("bubble"), ".1%"),
            _shown(None if peak is None else peak / GIB, ".1f"),
            str(run.skipped),
        )
        numbers = "".join(f"<td>{cell}</td>" for cell in cells)
        rows.append(
            f'<tr><td>{key}{html.escape(run.name)}</td><td class="text">{html.escape(run.layout)}</td>{numbers}</tr>'
        )
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _notes(runs: Sequence[Run]) -> str:
    items = []
    for run in runs:
        for step, note in run.notes():
            place = f"step {step:,}" if len(runs) == 1 else f"{html.escape(run.name)}, step {step:,}"
            items.append(f"<li><span>{place}</span>{html.escape(note)}</li>")
    if not items:
        return ""
    more = len(items) - _MOST_NOTES
    if more > 0:
        items = [*items[:_MOST_NOTES], f"<li>and {more:,} more in metrics.jsonl</li>"]
    return f'<section class="notes"><h2>What was told</h2><ol>{"".join(items)}</ol></section>'


def _data(charts: Sequence[Chart]) -> str:
    """What the readout needs, safe inside a script element."""
    found = [
        {
            "name": f"chart{index}",
            "x": axes_of(chart).x,
            "left": LEFT,
            "right": WIDTH - RIGHT,
            "width": WIDTH,
            "lines": [
                {"label": line.label, "colour": line.colour, "points": _rounded(thinned(line.points))}
                for line in chart.lines
                if line.points
            ],
        }
        for index, chart in enumerate(charts)
    ]
    return json.dumps(found).replace("</", "<\\/")


def _rounded(points: Sequence[Point]) -> list[tuple[float, float | None]]:
    """To six digits, for the size of the page."""
    return [(x, None if y is None else float(f"{y:.6g}")) for x, y in points]


def _file(name: str) -> str:
    return resources.files("slimpipe.report").joinpath(name).read_text(encoding="utf-8")
