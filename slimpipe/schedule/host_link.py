"""Host links in the simulator: each rank copies activations out and in, one after another in each direction.

A copy out starts at its O, a copy back at its R and not before the copy out is over. V waits for the one, the unit's B
for the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from slimpipe.schedule.action import Action, Op, Unit
from slimpipe.schedule.flow import Event, Flow, Rule
from slimpipe.schedule.loan_cost import Rate
from slimpipe.schedule.swap import UnitBytes


class Copied(NamedTuple):
    """A unit's activations are on the host, or back (`inward`)."""

    rank: int
    unit: Unit
    inward: bool

    def __str__(self) -> str:
        where = "back from the host" if self.inward else "copied to the host"
        return f"activations of {self.unit} {where} on rank {self.rank}"


class HostCopy(NamedTuple):
    """A copy's time on the link."""

    rank: int
    unit: Unit
    inward: bool
    start: float
    end: float


class HostLinks:
    """All ranks' links. `rate` None: copies take no time. `waited`: by rank, time in which compute waited for copies
    and for nothing else."""

    def __init__(self, ranks: int, bytes: UnitBytes | None = None, rate: Rate | None = None) -> None:
        self._bytes, self._rate = bytes, rate
        self._free = {inward: [0.0] * ranks for inward in (False, True)}
        self._away: set[tuple[int, Unit]] = set()
        self.copies: list[HostCopy] = []
        self.waited = [0.0] * ranks

    def copy(self, flow: Flow, rank: int, unit: Unit, inward: bool, time: float) -> None:
        start = max(time, self._free[inward][rank])
        end = start
        if self._rate is not None and self._bytes is not None:
            end += self._rate.latency + self._bytes.movable[rank][unit.chunk] / self._rate.bandwidth
        self._free[inward][rank] = end
        self._away.add((rank, unit))
        self.copies.append(HostCopy(rank, unit, inward, start, end))
        flow.post(Copied(rank, unit, inward), end)

    def awaited_by(self, rank: int, action: Action) -> tuple[Copied, ...]:
        """What a unit's backward waits for here; nothing where it stayed on the device."""
        if action.op is not Op.BACKWARD or (rank, action.unit) not in self._away:
            return ()
        return (Copied(rank, action.unit, inward=True),)

    def wait(self, rank: int, ready: float, copied: float) -> None:
        """Counts the wait of a rank that was ready but for a copy."""
        self.waited[rank] += max(0.0, copied - ready)


class OffloadRule(Rule):
    def __init__(self, links: HostLinks) -> None:
        self._links = links

    def run(self, flow: Flow, rank: int, action: Action, start: float) -> None:
        self._links.copy(flow, rank, action.unit, inward=False, time=start)


class ReloadRule(Rule):
    def __init__(self, links: HostLinks) -> None:
        self._links = links

    def run(self, flow: Flow, rank: int, action: Action, start: float) -> None:
        out = flow.when(Copied(rank, action.unit, inward=False))
        self._links.copy(flow, rank, action.unit, inward=True, time=max(start, out or 0.0))


class VacateRule(Rule):
    """Holds its rank until the copy out is over."""

    def __init__(self, links: HostLinks) -> None:
        self._links = links
        self._arrived: dict[int, float] = {}

    def arrive(self, flow: Flow, rank: int, action: Action, time: float) -> None:
        self._arrived[rank] = time

    def needs(self, flow: Flow, rank: int, action: Action) -> Sequence[Event]:
        return (Copied(rank, action.unit, inward=False),)

    def run(self, flow: Flow, rank: int, action: Action, start: float) -> float:
        self._links.wait(rank, self._arrived[rank], start)
        return start
