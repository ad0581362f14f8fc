"""What serves a shape best, transfers included: which granule, which fill, or no exchange (docs/exchange.md)."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

from slimpipe.schedule.balance import ATTENTION_BLOCK
from slimpipe.schedule.cheapest import Cheapest
from slimpipe.schedule.costs import Costs, LinkCost
from slimpipe.schedule.exchange import add_exchange
from slimpipe.schedule.gatherings import Gatherings
from slimpipe.schedule.loans import Exchange
from slimpipe.schedule.moves import Fill, Passes
from slimpipe.schedule.plan import Plan
from slimpipe.schedule.simulate import simulate
from slimpipe.schedule.slot_times import SlotTimes
from slimpipe.schedule.slots import KINDS, Kind, Pasts, Slots
from slimpipe.schedule.work import Work

PARTS: Final = (1, 2, 4, 8)
"""Granules a slice that are tried."""
FILLS: Final[tuple[Fill, ...]] = ("attention", "time")


class Granularity(NamedTuple):
    """`granule`: tokens. `time`: of all slots one after another, each as long as its longest rank."""

    time: float
    granule: int
    fill: Fill


def best_granularity(
    slots: Slots, work: Work, times: SlotTimes, passes: Passes | None, ranks_per_node: int
) -> Granularity:
    """The one with the shortest slots; among equals the coarsest, which has the fewest kernel calls.

    Parts of a slice are tried where attention kernels take them whole.
    """
    parts = [
        n for n in PARTS if work.slice_tokens % n == 0 and (n == 1 or work.slice_tokens // n % ATTENTION_BLOCK == 0)
    ]
    found = []
    for part in parts:
        for fill in FILLS:
            granule = work.slice_tokens // part
            cheapest = Cheapest(work, granule, times, passes, fill, ranks_per_node)
            found.append(Granularity(_all_slots(slots, cheapest, part), granule, fill))
    return min(found, key=lambda granularity: (granularity.time, -granularity.granule))


def if_shorter(plan: Plan, exchange: Exchange, times: SlotTimes, costs: Costs, link: LinkCost | None) -> Exchange:
    """The exchange, or one without loans where the step is no longer then.

    Loans that make every slot shorter can still make a step longer. Without them ranks drift apart until nobody waits;
    with a few, they are held together at every slot.
    """
    if not exchange.loans:
        return exchange
    with_loans = simulate(add_exchange(plan, exchange), costs, link, gatherings=Gatherings(exchange, times))
    if with_loans.makespan < simulate(plan, costs, link).makespan:
        return exchange
    return replace(exchange, place=tuple)


def _all_slots(slots: Slots, cheapest: Cheapest, per_slice: int) -> float:
    known: dict[tuple[Kind, Pasts], float] = {}
    total = 0.0
    for kind in KINDS:
        for _, pasts in slots.pasts(kind, per_slice):
            if (kind, pasts) not in known:
                known[kind, pasts] = cheapest.slot_time(kind, pasts, cheapest.moves(kind, pasts))
            total += known[kind, pasts]
    return total
