"""How long ranks that loans bind together take in a slot: what the simulator charges for exchange.

`schedule.layer_times` has the times with transfers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from slimpipe.schedule.loans import Loan
from slimpipe.schedule.slots import Kind
from slimpipe.schedule.work import Work


class Stay(NamedTuple):
    """A rank's time in a slot, from when the last of its group is ready: until it can go on, and busy within that."""

    until: float
    busy: float


class SlotTimes(Protocol):
    def of(self, kind: Kind, pasts: Mapping[int, int | None], loans: Sequence[Loan]) -> dict[int, Stay]:
        """By rank of a group bound by `loans`. `pasts`: slices before its unit, None for a rank without one."""
        ...

    def longest(self, kind: Kind, pasts: Mapping[int, int | None], loans: Sequence[Loan], limit: float) -> float:
        """The last of these ranks' `until`; where that is above `limit`, anything above it."""
        ...


@dataclass(frozen=True)
class InEqualTime:
    """All slots with loans take `time`: for pictures, and 0 for proofs."""

    time: float

    def of(self, kind: Kind, pasts: Mapping[int, int | None], loans: Sequence[Loan]) -> dict[int, Stay]:
        return dict.fromkeys(pasts, Stay(self.time, self.time))

    def longest(self, kind: Kind, pasts: Mapping[int, int | None], loans: Sequence[Loan], limit: float) -> float:
        return self.time


@dataclass(frozen=True)
class Together:
    """Free transfers, and ranks that go through the slot side by side, held to the pace of the longest of them.

    The columns `free` in docs/exchange.md count by it. It takes a slot as a whole: that an owner waits for its helper
    in every layer, before its dense work there, is not in it.
    """

    work: Work

    def of(self, kind: Kind, pasts: Mapping[int, int | None], loans: Sequence[Loan]) -> dict[int, Stay]:
        load = self.work.of(kind)
        balance = _net_tokens(loans)
        times = {}
        for rank, past in pasts.items():
            own = 0.0 if past is None else load.stays + load.token * self.work.slice_tokens * past
            times[rank] = own + load.token * balance[rank]
        longest = max(times.values())
        return {rank: Stay(longest, time) for rank, time in times.items()}

    def longest(self, kind: Kind, pasts: Mapping[int, int | None], loans: Sequence[Loan], limit: float) -> float:
        return max(stay.until for stay in self.of(kind, pasts, loans).values())


def _net_tokens(loans: Iterable[Loan]) -> defaultdict[int, int]:
    tokens: defaultdict[int, int] = defaultdict(int)
    for loan in loans:
        tokens[loan.owner] -= loan.tokens
        tokens[loan.helper] += loan.tokens
    return tokens
