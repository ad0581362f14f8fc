"""The loans that make a slot shortest, transfers included (docs/exchange.md).

What a loan's transfers cost depends on what they run beside, so candidates are compared by the time of their slot: no
loans, the balanced ones, and ones whose helpers take a few granules less than balance asks, to have results back in
time. Each with all its loans, and with those alone that the cost test passes one by one; with near helpers preferred,
and without.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from slimpipe.schedule.action import Unit
from slimpipe.schedule.loans import Loan
from slimpipe.schedule.moves import Fill, Move, Passes, balanced_moves, idle_more
from slimpipe.schedule.slot_times import SlotTimes
from slimpipe.schedule.slots import Kind, Pasts, Slot
from slimpipe.schedule.work import Work

SPARES: Final = (0.0, 0.125, 0.25, 0.375, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What helpers take less than owners keep, in slices, where granules allow it."""


def worth(moves: Sequence[Move], kind: Kind, granule: int, passes: Passes | None) -> list[Move]:
    """The moves that the cost test passes."""
    return [move for move in moves if passes is None or passes(kind, move.owner, move.helper, move.amount * granule)]


@dataclass(frozen=True)
class Cheapest:
    """Chooses the moves of a slot by `times`."""

    work: Work
    granule: int
    times: SlotTimes
    passes: Passes | None
    fill: Fill
    ranks_per_node: int

    def moves(self, kind: Kind, pasts: Pasts) -> list[Move]:
        """The candidate with the shortest slot; among equals the one with the fewest loans."""
        best: list[Move] = []
        shortest = self.slot_time(kind, pasts, best)
        tried: set[tuple[Move, ...]] = {()}
        for near in {self.ranks_per_node, len(pasts)}:
            for spare in self._spares():
                for moves in self._candidates(kind, pasts, near, spare):
                    # Often the same loans come out of several candidates.
                    if tuple(moves) in tried:
                        continue
                    tried.add(tuple(moves))
                    time = self.slot_time(kind, pasts, moves, shortest)
                    if (time, len(moves)) < (shortest, len(best)):
                        best, shortest = moves, time
        return best

    def slot_time(self, kind: Kind, pasts: Pasts, moves: Sequence[Move], limit: float = math.inf) -> float:
        """How long the slot's longest rank takes; above `limit`, anything above it. `pasts` in granules."""
        a_slice = self.work.slice_tokens // self.granule
        slices = {rank: None if past is None else past // a_slice for rank, past in enumerate(pasts)}
        slot, unit = Slot(0, kind), Unit(0, 0, 0)
        loans = [Loan(slot, owner, unit, helper, 0, amount * self.granule) for owner, helper, amount in moves]
        return self.times.longest(kind, slices, loans, limit)

    def _spares(self) -> list[int]:
        """In granules."""
        a_slice = self.work.slice_tokens // self.granule
        return sorted({round(spare * a_slice) for spare in SPARES})

    def _candidates(self, kind: Kind, pasts: Pasts, near: int, spare: int) -> Iterator[list[Move]]:
        moves = balanced_moves(pasts, idle_more(self.work, kind, self.fill, self.granule), near, spare)
        yield moves
        passed = worth(moves, kind, self.granule, self.passes)
        if len(passed) < len(moves):
            yield passed
