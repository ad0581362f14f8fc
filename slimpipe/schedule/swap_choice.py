"""Which units go to the host, and when they leave and come back: data in, trips out.

*Least*: the fewest bytes under which every rank's units in flight stay within a budget. Where memory is over it, the
unit whose backward is farthest goes: of all that could be away there, it is away longest, and units near their backward
stay. For units of one size and a link that keeps up this is the least (intervals on a line, the farthest end first).
*Share*: so much of what can go, those first that are away longest.

A unit is away from when its copy out is over to when its copy back has to start, the link's two queues counted, at
`PLANNED_SHARE` of its rate. Only where that does not bring memory down enough do units leave earlier or come later, so
that compute waits.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import Final, NamedTuple

from slimpipe.schedule.action import Op, Unit
from slimpipe.schedule.loan_cost import Rate
from slimpipe.schedule.plan import PlanError
from slimpipe.schedule.swap import Swap, Trip, UnitBytes
from slimpipe.schedule.timeline import Timeline

PLANNED_SHARE: Final = 0.8
"""Times are estimates: planned at so much of the link's rate, copies are in time where they are off by a quarter."""
_ROUNDING: Final = 1e-9
_ROUNDS: Final = 32


class Window(NamedTuple):
    """As `Trip`'s: computes before which a unit leaves and comes back."""

    vacate: int
    reload: int

    @property
    def empty(self) -> bool:
        return self.vacate >= self.reload


def least_swap(timeline: Timeline, sizes: UnitBytes, link: Rate, budget: Sequence[float]) -> Swap:
    """The least that keeps what units in flight hold within `budget` bytes by rank.

    `timeline`: the plan without swaps; `link`: of a rank to its host, in the timeline's time, both ways at once. Where
    the budget is out of reach, all that helps goes and `Swap.budget` says what is reached.
    """
    ranks = [RankUnits.of(timeline, sizes, link, rank) for rank in range(timeline.shape.p)]
    found = [units.least(budget[rank]) for rank, units in enumerate(ranks)]
    return _swap(ranks, sizes, found, list(budget))


def share_swap(timeline: Timeline, sizes: UnitBytes, link: Rate, share: float) -> Swap:
    """So much of each rank's movable bytes (0 to 1), those first that are away longest.

    What could be away only with waits goes last; a unit whose backward follows its forward stays in any case.
    """
    if not 0 <= share <= 1:
        raise PlanError(f"share = {share}: must lie between 0 and 1")
    ranks = [RankUnits.of(timeline, sizes, link, rank) for rank in range(timeline.shape.p)]
    return _swap(ranks, sizes, [units.share(share) for units in ranks], None)


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


@dataclass(frozen=True)
class RankUnits:
    """One rank's computes: when each begins and ends, which are each unit's, and what a unit weighs."""

    begins: tuple[float, ...]
    ends: tuple[float, ...]
    forward: dict[Unit, int]
    backward: dict[Unit, int]
    bytes_held: tuple[int, ...]
    bytes_moved: tuple[int, ...]
    link: Rate

    @classmethod
    def of(cls, timeline: Timeline, sizes: UnitBytes, link: Rate, rank: int) -> RankUnits:
        spans = [span for span in timeline.spans[rank] if span.action.op.is_compute]
        places: dict[Op, dict[Unit, int]] = {Op.FORWARD: {}, Op.BACKWARD: {}}
        for at, span in enumerate(spans):
            places[span.action.op][span.action.unit] = at
        return cls(
            tuple(span.start for span in spans),
            tuple(span.end for span in spans),
            places[Op.FORWARD],
            places[Op.BACKWARD],
            sizes.held[rank],
            sizes.movable[rank],
            Rate(link.latency, link.bandwidth * PLANNED_SHARE),
        )

    @cached_property
    def alone(self) -> dict[Unit, Window]:
        """Each unit's window if no other moved; none where it would not be away at all."""
        found = {unit: self.windows([unit])[unit] for unit in self.forward}
        return {unit: window for unit, window in found.items() if not window.empty and self._moved(unit)}

    def windows(self, units: Iterable[Unit]) -> dict[Unit, Window]:
        """When each can leave and has to come back for nothing to wait, all of them on one link each way."""
        units = list(units)
        vacate, reload = {}, {}
        free = 0.0
        for unit in sorted(units, key=lambda unit: self.forward[unit]):
            free = max(free, self.ends[self.forward[unit]]) + self._copy(unit)
            vacate[unit] = bisect_left(self.begins, free - _ROUNDING, lo=self.forward[unit] + 1)
        busy = float("inf")
        for unit in sorted(units, key=lambda unit: -self.backward[unit]):
            last = self.backward[unit]
            busy = min(self.begins[last], busy) - self._copy(unit)
            reload[unit] = max(0, bisect_right(self.begins, busy + _ROUNDING, hi=last + 1) - 1)
            busy = min(busy, self.begins[reload[unit]])
        return {unit: Window(vacate[unit], reload[unit]) for unit in units}

    def held(self, windows: dict[Unit, Window]) -> list[int]:
        """Bytes on the device while each compute runs."""
        change = [0] * (len(self.begins) + 1)
        for unit, at in self.forward.items():
            change[at] += self.bytes_held[unit.chunk]
            change[self.backward[unit] + 1] -= self.bytes_held[unit.chunk]
        for unit, window in windows.items():
            change[window.vacate] -= self._moved(unit)
            change[window.reload] += self._moved(unit)
        return list(accumulate(change))[:-1]

    # The least that fits

    def least(self, budget: float) -> dict[Unit, Window]:
        windows: dict[Unit, Window] = {}
        tried: set[Unit] = set()
        while more := self._farthest(self.held(windows), budget, tried):
            tried.update(more)
            # Copies queue: what each could do alone it may not do beside others, so this takes some rounds.
            windows = self._away(self.windows([*windows, *more]))
        self._force(windows, budget)
        self._give_up(windows, budget)
        self._leave_late(windows, budget)
        return windows

    def _farthest(self, held: Sequence[int], budget: float, tried: set[Unit]) -> list[Unit]:
        """In the order of time, where memory is over the budget: those whose backward is farthest."""
        coming = sorted((window.vacate, unit) for unit, window in self.alone.items() if unit not in tried)
        ready: list[tuple[int, int, Unit]] = []
        back = [0] * (len(held) + 1)
        found, away, at = [], 0, 0
        for now, bytes_now in enumerate(held):
            away -= back[now]
            while at < len(coming) and coming[at][0] <= now:
                unit = coming[at][1]
                heapq.heappush(ready, (-self.alone[unit].reload, -self._moved(unit), unit))
                at += 1
            while bytes_now - away > budget and ready and -ready[0][0] > now:
                unit = heapq.heappop(ready)[2]
                found.append(unit)
                away += self._moved(unit)
                back[self.alone[unit].reload] += self._moved(unit)
        return found

    def _force(self, windows: dict[Unit, Window], budget: float) -> None:
        """Where memory is still over the budget, units are away whatever the link says: the shortest waits first."""
        held = self.held(windows)
        flying: set[Unit] = set()
        events: dict[int, Unit] = {at: unit for unit, at in self.forward.items()}
        ended: dict[int, Unit] = {at: unit for unit, at in self.backward.items()}
        outs = {unit: self.ends[at] + self._copy(unit) for unit, at in self.forward.items()}
        for now in range(len(held)):
            flying.discard(ended.get(now, _NONE))
            if held[now] > budget:
                here = [unit for unit in flying if not self._is_away(windows.get(unit), now) and self._moved(unit)]
                for unit in self._enough(here, now, held[now], budget, outs):
                    before = windows.get(unit, Window(now, now))
                    after = windows[unit] = Window(min(before.vacate, now), max(before.reload, now + 1))
                    for at in chain(range(after.vacate, before.vacate), range(before.reload, after.reload)):
                        held[at] -= self._moved(unit)
            if now in events:
                flying.add(events[now])

    def _enough(
        self, units: list[Unit], now: int, holds: int, budget: float, outs: dict[Unit, float]
    ) -> Iterator[Unit]:
        """Of these, those to be away for compute `now`, which `holds` so much, to be within the budget: all where even
        that is not enough, else the shortest waits first."""
        if holds - sum(map(self._moved, units)) >= budget:
            yield from units
            return
        options = [(self._wait(unit, now, outs[unit]), -self.backward[unit], unit) for unit in units]
        heapq.heapify(options)
        while holds > budget:
            unit = heapq.heappop(options)[2]
            holds -= self._moved(unit)
            yield unit

    def _wait(self, unit: Unit, now: int, out: float) -> float:
        """About how long compute waits where the unit is away while compute `now` runs."""
        late_out = max(0.0, out - self.begins[now])
        late_in = max(0.0, self.begins[now + 1] + self._copy(unit) - self.begins[self.backward[unit]])
        return late_out + late_in

    def _give_up(self, windows: dict[Unit, Window], budget: float) -> None:
        """What turned out not to be needed stays; those that are away shortest are asked first."""
        held = self.held(windows)
        for unit in sorted(windows, key=lambda unit: (windows[unit].reload - windows[unit].vacate, unit)):
            vacate, reload = windows[unit]
            if max(held[vacate:reload]) + self._moved(unit) <= budget:
                for at in range(vacate, reload):
                    held[at] += self._moved(unit)
                del windows[unit]

    def _leave_late(self, windows: dict[Unit, Window], budget: float) -> None:
        """Memory that nobody needs yet need not be waited for."""
        held = self.held(windows)
        for unit in sorted(windows, key=lambda unit: -self.forward[unit]):
            window = windows[unit]
            vacate = window.vacate
            while vacate + 1 < window.reload and held[vacate] + self._moved(unit) <= budget:
                held[vacate] += self._moved(unit)
                vacate += 1
            windows[unit] = Window(vacate, window.reload)

    # A share

    def share(self, share: float) -> dict[Unit, Window]:
        wanted = share * sum(map(self._moved, self.forward)) * (1 + _ROUNDING)
        order = sorted(
            (unit for unit in self.forward if self.backward[unit] - self.forward[unit] > 1 and self._moved(unit)),
            key=lambda unit: (self.ends[self.forward[unit]] - self.begins[self.backward[unit]], unit),
        )
        windows: dict[Unit, Window] = {}
        left, late = order, list[Unit]()
        for _ in range(_ROUNDS):
            taken, rest = self._up_to(left, wanted - sum(map(self._moved, windows)))
            if not taken:
                break
            found = self.windows([*windows, *taken])
            windows = self._away(found)
            late += [unit for unit in found if unit not in windows]
            left = rest
        late += left
        forced, _ = self._up_to(late, wanted - sum(map(self._moved, windows)))
        return windows | {unit: Window(self.forward[unit] + 1, self.backward[unit]) for unit in forced}

    def _up_to(self, units: Sequence[Unit], room: float) -> tuple[list[Unit], list[Unit]]:
        taken, rest = [], []
        for unit in units:
            if self._moved(unit) <= room:
                taken.append(unit)
                room -= self._moved(unit)
            else:
                rest.append(unit)
        return taken, rest

    @staticmethod
    def _away(windows: dict[Unit, Window]) -> dict[Unit, Window]:
        return {unit: window for unit, window in windows.items() if not window.empty}

    @staticmethod
    def _is_away(window: Window | None, at: int) -> bool:
        return window is not None and window.vacate <= at < window.reload

    def _moved(self, unit: Unit) -> int:
        return self.bytes_moved[unit.chunk]

    def _copy(self, unit: Unit) -> float:
        return self.link.latency + self._moved(unit) / self.link.bandwidth


_NONE: Final = Unit(-1, -1, -1)
