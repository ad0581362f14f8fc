"""Exchange in the simulator: ranks that loans bind together go through a slot side by side (docs/exchange.md).

A group starts when the last of its ranks has come to the slot with its input there, and holds each of them for the time
that `SlotTimes` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from slimpipe.schedule.action import Action
from slimpipe.schedule.flow import Event, Flow, Rule
from slimpipe.schedule.loans import Exchange
from slimpipe.schedule.slot_times import SlotTimes, Stay
from slimpipe.schedule.slots import Slot


class Gathered(NamedTuple):
    """All ranks of a slot's group are ready."""

    slot: Slot
    group: frozenset[int]

    def __str__(self) -> str:
        return f"ranks {', '.join(map(str, sorted(self.group)))} in the {self.slot}"


class Gatherings:
    """All groups of a run. `waited`: by rank, time in which it was held by its partners and did nothing."""

    def __init__(self, exchange: Exchange, times: SlotTimes) -> None:
        self._exchange, self._times = exchange, times
        ranks = exchange.slots.shape.p
        self._arrived = [0.0] * ranks
        self._ready: dict[Gathered, dict[int, float]] = {}
        self._stays: dict[Gathered, dict[int, Stay]] = {}
        self.waited = [0.0] * ranks

    def of(self, rank: int, action: Action) -> Gathered | None:
        """What the rank waits for in this action; None where no loans bind it."""
        slot = self._exchange.slots.slot_of(rank, action)
        group = self._exchange.group_of(rank, slot)
        return Gathered(slot, group) if len(group) > 1 else None

    def arrive(self, rank: int, time: float) -> None:
        """The rank has come to an action; its input may still be on the way."""
        self._arrived[rank] = time

    def needs(self, flow: Flow, rank: int, action: Action, inputs: Sequence[Event]) -> Sequence[Event]:
        """The action's inputs, and once they are there its group too."""
        gathered = self.of(rank, action)
        times = [flow.when(event) for event in inputs]
        if gathered is None or None in times:
            return inputs
        ready = self._ready.setdefault(gathered, {})
        if rank not in ready:
            ready[rank] = max([self._arrived[rank], *(time for time in times if time is not None)])
            if len(ready) == len(gathered.group):
                flow.post(gathered, max(ready.values()))
        return (*inputs, gathered)

    def missing(self, gathered: Gathered) -> list[int]:
        """Ranks that are not ready."""
        return sorted(gathered.group - self._ready.get(gathered, {}).keys())

    def stay(self, rank: int, action: Action) -> Stay | None:
        """The rank's time with its group; None where no loans bind it. Once for each action that runs."""
        gathered = self.of(rank, action)
        if gathered is None:
            return None
        stays = self._stays.pop(gathered, None) or self._of_group(gathered)
        stay = stays.pop(rank)
        if stays:
            self._stays[gathered] = stays
        self.waited[rank] += stay.until - stay.busy
        return stay

    def _of_group(self, gathered: Gathered) -> dict[int, Stay]:
        slot, group = gathered
        units = {rank: self._exchange.slots.unit(slot, rank) for rank in sorted(group)}
        pasts = {rank: None if unit is None else unit.slice for rank, unit in units.items()}
        loans = [loan for loan in self._exchange.by_slot[slot] if loan.owner in group]
        return self._times.of(slot.kind, pasts, loans)


class HelpRule(Rule):
    """An idle rank computes what others lent to it."""

    def __init__(self, gatherings: Gatherings) -> None:
        self._gatherings = gatherings

    def arrive(self, flow: Flow, rank: int, action: Action, time: float) -> None:
        self._gatherings.arrive(rank, time)

    def needs(self, flow: Flow, rank: int, action: Action) -> Sequence[Event]:
        return self._gatherings.needs(flow, rank, action, ())

    def run(self, flow: Flow, rank: int, action: Action, start: float) -> float | None:
        stay = self._gatherings.stay(rank, action)
        return None if stay is None else start + stay.until
