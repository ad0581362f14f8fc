"""KV slots: replayed over each rank's list, every past is exactly the slots of its earlier slices.

The assignment is computed in `kv_slots`; this proves it without trusting it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from slimpipe.schedule.action import Op, Unit
from slimpipe.schedule.excerpt import refusal
from slimpipe.schedule.in_flight import is_forward_only
from slimpipe.schedule.kv_slots import RankSlots, assign_kv_slots
from slimpipe.schedule.plan import Plan


def prove_kv_slots(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """KV slots by rank and chunk. Raises PlanError at a slot used twice, or a past that is not its earlier slices."""
    capacities = []
    for rank, actions in enumerate(plan.ranks):
        slots = assign_kv_slots(plan.shape, actions)
        prove_rank_slots(plan, rank, slots)
        capacities.append(slots.capacity)
    return tuple(capacities)


def prove_rank_slots(plan: Plan, rank: int, slots: RankSlots) -> None:
    """Raises PlanError where `slots` does not serve the rank's list. Relies on `proofs.units` and `proofs.order`."""
    owners: list[dict[int, Unit]] = [{} for _ in slots.capacity]
    slices: dict[tuple[int, int], list[int]] = {}
    forward_only = is_forward_only(plan.ranks[rank])
    for index, action in enumerate(plan.ranks[rank]):
        if not action.op.is_compute:
            continue
        unit, place = action.unit, slots.places[action.unit]
        owner, capacity = owners[unit.chunk], slots.capacity[unit.chunk]
        # Slots of the microbatch's slices 0, 1, ... in that order: they run forward ascending, backward descending.
        own = slices.setdefault((unit.microbatch, unit.chunk), [])
        if action.op is Op.BACKWARD:
            del owner[own.pop()]
        if not 0 <= place.slot < capacity:
            raise refusal(plan, rank, index, f"KV slot {place.slot} is outside the chunk's {capacity}")
        if place.slot in owner:
            raise refusal(plan, rank, index, f"KV slot {place.slot} still holds unit {owner[place.slot]}")
        if not _is(place.past, own):
            raise refusal(plan, rank, index, f"past {place.past}: expected ranges of the slots {sorted(own)}")
        if action.op is Op.FORWARD:
            owner[place.slot] = unit
            own.append(place.slot)
            if forward_only and unit.slice == plan.shape.n - 1:
                while own:
                    del owner[own.pop()]


def _is(ranges: Sequence[tuple[int, int]], slots: Sequence[int]) -> bool:
    """Whether the ranges, ascending, none empty and none touching another, are exactly these slots."""
    if any(start >= end for start, end in ranges) or any(a[1] >= b[0] for a, b in pairwise(ranges)):
        return False
    return [slot for start, end in ranges for slot in range(start, end)] == sorted(slots)
