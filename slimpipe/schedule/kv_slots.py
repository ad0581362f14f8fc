"""Where each unit's keys and values lie: slots of one buffer a chunk, never moved (docs/architecture.md, "KV slots").

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
from slimpipe.schedule.in_flight import is_forward_only, peak_kept
from slimpipe.schedule.plan import Shape

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of slots, ascending, none touching another."""


@dataclass(frozen=True)
class SlotPlace:
    """A unit's own slot, and where its microbatch's earlier slices lie."""

    slot: int
    past: Ranges


@dataclass(frozen=True)
class RankSlots:
    """`capacity[chunk]` slots a buffer; `places[unit]` for every unit of the rank."""

    capacity: tuple[int, ...]
    places: dict[Unit, SlotPlace]


def assign_kv_slots(shape: Shape, actions: Iterable[Action]) -> RankSlots:
    """Slots for one rank's forwards and backwards, in the order in which it runs them.

    Expects what `check` proves of a plan: each unit forward once and backward once, backwards of a microbatch
    in the reverse order of its forwards. In a list without backwards a microbatch's slots, in a chunk, are free behind
    the forward of its last slice.
    """
    actions = [action for action in actions if action.op.is_compute]
    capacity = tuple(peak_kept(shape, actions, chunk) for chunk in range(shape.v))
    forward_only = is_forward_only(actions)
    free = [[True] * slots for slots in capacity]
    held: dict[tuple[int, int], Ranges] = {}
    places: dict[Unit, SlotPlace] = {}
    for action in actions:
        unit = action.unit
        microbatch = unit.microbatch, unit.chunk
        if action.op is Op.FORWARD:
            past = held.get(microbatch, ())
            slot = _choose(free[unit.chunk], past, from_left=unit.microbatch % 2 == 0)
            places[unit] = SlotPlace(slot, past)
            held[microbatch] = join(past, slot)
            free[unit.chunk][slot] = False
            if forward_only and unit.slice == shape.n - 1:
                for start, end in held.pop(microbatch):
                    free[unit.chunk][start:end] = [True] * (end - start)
        else:
            # What the microbatch holds from here on is what it held when this slice came.
            held[microbatch] = places[unit].past
            free[unit.chunk][places[unit].slot] = True
    return RankSlots(capacity, places)


def join(ranges: Ranges, slot: int) -> Ranges:
    """The ranges with a slot more, ascending, neighbours joined."""
    start, end = slot, slot + 1
    before = [r for r in ranges if r[1] <= slot]
    after = [r for r in ranges if r[0] > slot]
    if before and before[-1][1] == start:
        start = before.pop()[0]
    if after and after[0][0] == end:
        end = after.pop(0)[1]
    return (*before, (start, end), *after)


def _choose(free: Sequence[bool], own: Ranges, from_left: bool) -> int:
    """A free slot for a microbatch that holds `own`: beside its range, onward before back; else nearest its end."""
    if own:
        first, end = own[0][0], own[-1][1]
        beside = (end, first - 1) if from_left else (first - 1, end)
        for slot in beside:
            if 0 <= slot < len(free) and free[slot]:
                return slot
    slots = range(len(free)) if from_left else range(len(free))[::-1]
    return next(slot for slot in slots if free[slot])
