"""A plan as a text grid, rank x time: what to look at first when a schedule puzzles.

1f1b with p = 2 and m = 2:

    tick       0     1     2     3     4     5
    rank 0  F0.0  F1.0     .  B0.0     .  B1.0
    rank 1     .  F0.0  B0.0  F1.0  B1.0     .

Where a rank swaps, two lines below its own show what its host link carries out (O) and back (R), and of keys and values
that stream either way (K).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from slimpipe.schedule.action import Op
from slimpipe.schedule.costs import VocabularyCosts, equal_costs
from slimpipe.schedule.flow import Span
from slimpipe.schedule.gatherings import Gatherings
from slimpipe.schedule.host_link import HostCopy, HostLinks
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
        with_chunk = timeline.shape.v > 1
        rows.append([f"rank {rank}", *_cells([_shown(span, with_chunk) for span in spans], tick, ticks)])
        for inward, name in ((False, "  out"), (True, "  back")):
            copies = [copy for copy in timeline.copies if (copy.rank, copy.inward) == (rank, inward)]
            copies.sort(key=lambda copy: copy.start)
            if copies:
                rows.append([name, *_cells([_copied(copy, with_chunk) for copy in copies], tick, ticks)])
    label = max(len(row[0]) for row in rows)
    width = max((len(cell) for row in rows for cell in row[1:]), default=1)
    return "\n".join("  ".join([row[0].ljust(label), *(cell.rjust(width) for cell in row[1:])]) for row in rows) + "\n"


class _Shown(NamedTuple):
    text: str
    start: float
    end: float


def _shown(span: Span, with_chunk: bool) -> _Shown:
    return _Shown(_short(str(span.action), with_chunk), span.start, span.end)


def _copied(copy: HostCopy, with_chunk: bool) -> _Shown:
    kind = "K" if copy.keys else (Op.RELOAD if copy.inward else Op.OFFLOAD).value
    return _Shown(_short(f"{kind}{copy.unit}", with_chunk), copy.start, copy.end)


def _short(token: str, with_chunk: bool) -> str:
    return token if with_chunk else token.partition("@")[0]


def _cells(shown: Sequence[_Shown], tick: float, ticks: range) -> list[str]:
    cells = []
    at = 0
    before = None
    for index in ticks:
        middle = (index + 0.5) * tick
        while at < len(shown) and shown[at].end <= middle:
            at += 1
        if at == len(shown) or shown[at].start > middle:
            cells.append(IDLE)
        elif at == before:
            cells.append(CONTINUED)
        else:
            cells.append(shown[at].text)
            before = at
    return cells
