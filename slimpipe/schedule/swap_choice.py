"""Which units go to the host, and when they leave and come back: data in, trips out.

*Least*: the fewest bytes under which every rank's units in flight stay within a budget. Where memory is over it, the
unit whose backward is farthest goes: of all that could be away there, it is away longest, and units near their backward
stay. For units of one size and a link that keeps up this is the least (intervals on a line, the farthest end first).
*Share*: so much of what can go, those first that are away longest.

A unit is away when the link allows it (`swap_units`). Only where that does not bring memory down enough do units leave
earlier or come later, so that compute waits (`swap_forced`).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Final

from slimpipe.schedule.action import Unit
from slimpipe.schedule.loan_cost import Rate
from slimpipe.schedule.plan import PlanError
from slimpipe.schedule.swap import Swap, Trip, UnitBytes
from slimpipe.schedule.swap_forced import force
from slimpipe.schedule.swap_units import ROUNDING, RankUnits, Window
from slimpipe.schedule.timeline import Timeline

_ROUNDS: Final = 32


def least_swap(timeline: Timeline, sizes: UnitBytes, link: Rate, budget: Sequence[float]) -> Swap:
    """The least that keeps what units in flight hold within `budget` bytes by rank.

    `timeline`: the plan without swaps; `link`: of a rank to its host, in the timeline's time, both ways at once. Where
    the budget is out of reach, all that helps goes and `Swap.budget` says what is reached.
    """
    ranks = [RankUnits.of(timeline, sizes, link, rank) for rank in range(timeline.shape.p)]
    found = [_least(units, budget[rank]) for rank, units in enumerate(ranks)]
    return _swap(ranks, sizes, found, list(budget))


def share_swap(timeline: Timeline, sizes: UnitBytes, link: Rate, share: float) -> Swap:
    """So much of each rank's movable bytes (0 to 1), those first that are away longest.

    What could be away only with waits goes last; a unit whose backward follows its forward stays in any case.
    """
    if not 0 <= share <= 1:
        raise PlanError(f"share = {share}: must lie between 0 and 1")
    ranks = [RankUnits.of(timeline, sizes, link, rank) for rank in range(timeline.shape.p)]
    return _swap(ranks, sizes, [_share(units, share) for units in ranks], None)


def _swap(
    ranks: Sequence[RankUnits], sizes: UnitBytes, found: Sequence[dict[Unit, Window]], budget: list[float] | None
) -> Swap:
    trips, held = [], []
    for units, windows in zip(ranks, found, strict=True):
        order = sorted(windows, key=lambda unit: units.forward[unit])
        trips.append(tuple(Trip(unit, *windows[unit]) for unit in order))
        held.append(float(max(units.held(windows), default=0)))
    wanted = held if budget is None else budget
    stated = [max(pair) for pair in zip(held, wanted, strict=True)]
    return Swap(sizes, tuple(trips), tuple(stated), tuple(wanted))


# ---- the least that fits ----


def _least(units: RankUnits, budget: float) -> dict[Unit, Window]:
    windows: dict[Unit, Window] = {}
    tried: set[Unit] = set()
    while more := _farthest(units, units.held(windows), budget, tried):
        tried.update(more)
        # Copies queue: what each could do alone it may not do beside others, so this takes some rounds.
        windows = _away(units.windows([*windows, *more]))
    windows = force(units, windows, budget)
    _give_up(units, windows, budget)
    _leave_late(units, windows, budget)
    return windows


def _farthest(units: RankUnits, held: Sequence[int], budget: float, tried: set[Unit]) -> list[Unit]:
    """In the order of time, where memory is over the budget: those whose backward is farthest."""
    coming = sorted((window.vacate, unit) for unit, window in units.alone.items() if unit not in tried)
    ready: list[tuple[int, int, Unit]] = []
    back = [0] * (len(held) + 1)
    found, away, at = [], 0, 0
    for now, bytes_now in enumerate(held):
        away -= back[now]
        while at < len(coming) and coming[at][0] <= now:
            unit = coming[at][1]
            heapq.heappush(ready, (-units.alone[unit].reload, -units.moved(unit), unit))
            at += 1
        while bytes_now - away > budget and ready and -ready[0][0] > now:
            unit = heapq.heappop(ready)[2]
            found.append(unit)
            away += units.moved(unit)
            back[units.alone[unit].reload] += units.moved(unit)
    return found


def _give_up(units: RankUnits, windows: dict[Unit, Window], budget: float) -> None:
    """What turned out not to be needed stays; those that are away shortest are asked first."""
    held = units.held(windows)
    for unit in sorted(windows, key=lambda unit: (windows[unit].reload - windows[unit].vacate, unit)):
        vacate, reload = windows[unit]
        if max(held[vacate:reload]) + units.moved(unit) <= budget:
            for at in range(vacate, reload):
                held[at] += units.moved(unit)
            del windows[unit]


def _leave_late(units: RankUnits, windows: dict[Unit, Window], budget: float) -> None:
    """Memory that nobody needs yet need not be waited for."""
    held = units.held(windows)
    for unit in sorted(windows, key=lambda unit: -units.forward[unit]):
        window = windows[unit]
        vacate = window.vacate
        while vacate + 1 < window.reload and held[vacate] + units.moved(unit) <= budget:
            held[vacate] += units.moved(unit)
            vacate += 1
        windows[unit] = Window(vacate, window.reload)


# ---- a share ----


def _share(units: RankUnits, share: float) -> dict[Unit, Window]:
    wanted = share * sum(map(units.moved, units.forward)) * (1 + ROUNDING)
    order = sorted(
        (unit for unit in units.forward if units.backward[unit] - units.forward[unit] > 1 and units.moved(unit)),
        key=lambda unit: (units.ends[units.forward[unit]] - units.begins[units.backward[unit]], unit),
    )
    windows: dict[Unit, Window] = {}
    left, late = order, list[Unit]()
    for _ in range(_ROUNDS):
        taken, rest = _up_to(units, left, wanted - sum(map(units.moved, windows)))
        if not taken:
            break
        found = units.windows([*windows, *taken])
        windows = _away(found)
        late += [unit for unit in found if unit not in windows]
        left = rest
    late += left
    forced, _ = _up_to(units, late, wanted - sum(map(units.moved, windows)))
    return windows | {unit: Window(units.forward[unit] + 1, units.backward[unit]) for unit in forced}


def _up_to(units: RankUnits, order: Sequence[Unit], room: float) -> tuple[list[Unit], list[Unit]]:
    taken, rest = [], []
    for unit in order:
        if units.moved(unit) <= room:
            taken.append(unit)
            room -= units.moved(unit)
        else:
            rest.append(unit)
    return taken, rest


def _away(windows: dict[Unit, Window]) -> dict[Unit, Window]:
    return {unit: window for unit, window in windows.items() if not window.empty}
