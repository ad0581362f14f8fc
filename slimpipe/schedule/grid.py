"""A plan as a text grid, rank x time: what to look at first when a schedule puzzles (DESIGN section 2).

1f1b with p = 2 and m = 2:

    tick       0     1     2     3     4     5
    rank 0  F0.0  F1.0     .  B0.0     .  B1.0
    rank 1     .  F0.0  B0.0  F1.0  B1.0     .

Where a rank swaps, two lines below its own show what its host link carries out (O) and back (R).
"""

from __future__ import annotations

from dataclasses import replace

from slimpipe.schedule.action import Action, Op
from slimpipe.schedule.costs import VocabularyCosts, equal_costs
from slimpipe.schedule.flow import Span
from slimpipe.schedule.gatherings import Gatherings
from slimpipe.schedule.host_link import HostLinks
from slimpipe.schedule.loan_cost import Rate
from slimpipe.schedule.loans import Exchange
from slimpipe.schedule.plan import Plan
from slimpipe.schedule.simulate import simulate
from slimpipe.schedule.slot_times import InEqualTime
from slimpipe.schedule.swap import UnitBytes
from slimpipe.schedule.timeline import Timeline

_ONE_TICK = replace(equal_costs(1.0, 1.0), vocabulary=VocabularyCosts(statistics=1.0, gradient=1.0))
IDLE = "."
CONTINUED = "-"


def grid(
    source: Plan | Timeline,
    tick: float | None = None,
    first: int = 0,
    last: int | None = None,
    exchange: Exchange | None = None,
) -> str:
    """Ranks x ticks `first` up to, not including, `last`.

    A plan is drawn with forwards, backwards, passes S and T, and copies to the host and back of one tick each. A
    timeline is sampled in the middle of each tick, which defaults to its shortest forward or backward; `-` continues
    the action to its left, `.` is idle. Chunks are left out where there is one a rank. `exchange`: of a plan with
    helpers, whose actions take a tick too.
    """
    if isinstance(source, Plan):
        gatherings = Gatherings(exchange, InEqualTime(1.0)) if exchange is not None else None
        shape = source.shape
        host = HostLinks(shape.p, UnitBytes.equal(shape), Rate(0.0, 1.0))
        timeline = simulate(source, _ONE_TICK, gatherings=gatherings, host=host)
    else:
        timeline = source
    if tick is None:
        computes = (span for spans in timeline.spans for span in spans if span.action.op.is_compute)
        tick = min((span.end - span.start for span in computes), default=1.0)
    if tick <= 0:
        raise ValueError(f"tick = {tick}: must be above 0")
    ticks = range(first, max(first, round(timeline.makespan / tick) if last is None else last))
    rows = [["tick", *map(str, ticks)]]
    for rank, spans in enumerate(timeline.spans):
        rows.append([f"rank {rank}", *_cells(spans, tick, ticks, timeline.shape.v > 1)])
        for inward, op, name in ((False, Op.OFFLOAD, "  out"), (True, Op.RELOAD, "  back")):
            copies = [copy for copy in timeline.copies if (copy.rank, copy.inward) == (rank, inward)]
            if copies:
                found = tuple(Span(Action(op, copy.unit), copy.start, copy.end) for copy in copies)
                rows.append([name, *_cells(found, tick, ticks, timeline.shape.v > 1)])
    label = max(len(row[0]) for row in rows)
    width = max((len(cell) for row in rows for cell in row[1:]), default=1)
    return "\n".join("  ".join([row[0].ljust(label), *(cell.rjust(width) for cell in row[1:])]) for row in rows) + "\n"


def _cells(spans: tuple[Span, ...], tick: float, ticks: range, with_chunk: bool) -> list[str]:
    cells = []
    at = 0
    shown = None
    for index in ticks:
        middle = (index + 0.5) * tick
        while at < len(spans) and spans[at].end <= middle:
            at += 1
        if at == len(spans) or spans[at].start > middle:
            cells.append(IDLE)
        elif at == shown:
            cells.append(CONTINUED)
        else:
            cells.append(_short(spans[at].action, with_chunk))
            shown = at
    return cells


def _short(action: Action, with_chunk: bool) -> str:
    return str(action) if with_chunk else str(action).partition("@")[0]
