"""One rank's units in time: when each can leave for the host and has to be back for nothing to wait, and what is held.

A unit is away from when its copy out is over to when its copy back has to start, the link's two queues counted, at
`PLANNED_SHARE` of its rate.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Final, NamedTuple

from slimpipe.schedule.action import Op, Unit
from slimpipe.schedule.loan_cost import Rate
from slimpipe.schedule.swap import UnitBytes
from slimpipe.schedule.timeline import Timeline

PLANNED_SHARE: Final = 0.8
"""Times are estimates: planned at so much of the link's rate, copies are in time where they are off by a quarter."""
ROUNDING: Final = 1e-9


class Window(NamedTuple):
    """As `Trip`'s: computes before which a unit leaves and comes back."""

    vacate: int
    reload: int

    @property
    def empty(self) -> bool:
        return self.vacate >= self.reload


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
        return {unit: window for unit, window in found.items() if not window.empty and self.moved(unit)}

    def windows(self, units: Iterable[Unit]) -> dict[Unit, Window]:
        """When each can leave and has to come back for nothing to wait, all of them on one link each way."""
        units = list(units)
        vacate, reload = {}, {}
        free = 0.0
        for unit in sorted(units, key=lambda unit: self.forward[unit]):
            free = max(free, self.ends[self.forward[unit]]) + self.copy(unit)
            vacate[unit] = bisect_left(self.begins, free - ROUNDING, lo=self.forward[unit] + 1)
        busy = float("inf")
        for unit in sorted(units, key=lambda unit: -self.backward[unit]):
            last = self.backward[unit]
            busy = min(self.begins[last], busy) - self.copy(unit)
            reload[unit] = max(0, bisect_right(self.begins, busy + ROUNDING, hi=last + 1) - 1)
            busy = min(busy, self.begins[reload[unit]])
        return {unit: Window(vacate[unit], reload[unit]) for unit in units}

    def held(self, windows: dict[Unit, Window]) -> list[int]:
        """Bytes on the device while each compute runs."""
        change = [0] * (len(self.begins) + 1)
        for unit, at in self.forward.items():
            change[at] += self.bytes_held[unit.chunk]
            change[self.backward[unit] + 1] -= self.bytes_held[unit.chunk]
        for unit, window in windows.items():
            change[window.vacate] -= self.moved(unit)
            change[window.reload] += self.moved(unit)
        return list(accumulate(change))[:-1]

    def moved(self, unit: Unit) -> int:
        """Bytes of it that can go."""
        return self.bytes_moved[unit.chunk]

    def copy(self, unit: Unit) -> float:
        """What its copy takes, either way."""
        return self.link.latency + self.moved(unit) / self.link.bandwidth
