"""Where each unit's keys and values lie: slots of one buffer a chunk, never moved (DESIGN section 3, "KV slots").

A query's past has no order once RoPE is applied, so the earlier slices may lie anywhere, as long as attention can
read them in few contiguous ranges. The buffer has exactly the chunk's peak of units in flight. Even microbatches
grow from its left end, odd ones from its right; a new slice takes the free slot next to its own microbatch's range,
which in the steady state is the slot that the last backward just freed.

As the oldest microbatch shrinks towards its end, the youngest of the same parity starts beside what is left of it and
follows it there, then turns and grows the ordinary way: so with n >= 2p every past is one range, though not always in
slice order. With fewer slices more microbatches are in flight, a range may meet others on both sides, and the past
becomes two ranges. tests/schedule/test_kv_slots.py holds the grid over which both were tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slimpipe.schedule.action import Action, Op, Unit
from slimpipe.schedule.in_flight import peak_units
from slimpipe.schedule.plan import Shape


@dataclass(frozen=True)
class SlotPlace:
    """A unit's own slot, and its microbatch's earlier slices as half-open ranges of slots, ascending and merged."""

    slot: int
    past: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class RankSlots:
    """`capacity[chunk]` slots a buffer; `places[unit]` for every unit of the rank."""

    capacity: tuple[int, ...]
    places: dict[Unit, SlotPlace]


def assign_kv_slots(shape: Shape, actions: Iterable[Action]) -> RankSlots:
    """Slots for one rank's forwards and backwards, in the order in which it runs them.

    Expects what `check` proves of a plan: each unit forward once and backward once, backwards of a microbatch
    in the reverse order of its forwards.
    """
    actions = [action for action in actions if action.op.is_compute]
    capacity = tuple(peak_units(actions, chunk) for chunk in range(shape.v))
    free = [[True] * slots for slots in capacity]
    held: dict[tuple[int, int], list[int]] = {}
    places: dict[Unit, SlotPlace] = {}
    for action in actions:
        unit = action.unit
        own = held.setdefault((unit.microbatch, unit.chunk), [])
        if action.op is Op.FORWARD:
            slot = _choose(free[unit.chunk], own, from_left=unit.microbatch % 2 == 0)
            places[unit] = SlotPlace(slot, merge_slots(own))
            own.append(slot)
            free[unit.chunk][slot] = False
        else:
            free[unit.chunk][own.pop()] = True
    return RankSlots(capacity, places)


def merge_slots(slots: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Slots as half-open ranges, ascending, neighbours joined."""
    ranges: list[tuple[int, int]] = []
    for slot in sorted(slots):
        if ranges and ranges[-1][1] == slot:
            ranges[-1] = (ranges[-1][0], slot + 1)
        else:
            ranges.append((slot, slot + 1))
    return tuple(ranges)


def _choose(free: Sequence[bool], own: Sequence[int], from_left: bool) -> int:
    """A free slot for a microbatch that holds `own`: beside its range, onward before back; else nearest its end."""
    if own:
        beside = (max(own) + 1, min(own) - 1) if from_left else (min(own) - 1, max(own) + 1)
        for slot in beside:
            if 0 <= slot < len(free) and free[slot]:
                return slot
    slots = range(len(free)) if from_left else range(len(free))[::-1]
    return next(slot for slot in slots if free[slot])
