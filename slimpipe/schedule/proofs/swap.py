"""Swaps: each unit stays, or goes out, leaves and comes back once each and in time; memory within what was stated."""

from __future__ import annotations

from slimpipe.schedule.action import Action, Op, Unit
from slimpipe.schedule.excerpt import refusal
from slimpipe.schedule.held import held_by_units
from slimpipe.schedule.plan import Plan
from slimpipe.schedule.swap import Swap

_BEFORE = {Op.OFFLOAD: Op.FORWARD, Op.VACATE: Op.OFFLOAD, Op.RELOAD: Op.VACATE}
_ORDER = (Op.FORWARD, Op.OFFLOAD, Op.VACATE, Op.RELOAD, Op.BACKWARD)


def prove_swap(plan: Plan, swap: Swap | None) -> None:
    """Raises PlanError at the first swap that is out of place, missing, twice or too much. Relies on `prove_units`.

    `swap` None: the order alone is proved.
    """
    if swap is not None:
        swap.prove_made_for(plan)
    for rank in range(plan.shape.p):
        _prove_order(plan, rank)
        if swap is not None:
            _prove_as_stated(plan, rank, swap)


def _prove_order(plan: Plan, rank: int) -> None:
    done: dict[Unit, Op] = {}
    for index, action in enumerate(plan.ranks[rank]):
        unit, last = action.unit, done.get(action.unit)
        if action.op.is_swap:
            before = _BEFORE[action.op]
            if last is not before:
                found = "nothing" if last is None else str(Action(last, unit))
                raise refusal(plan, rank, index, f"expected {Action(before, unit)} last of its unit, found {found}")
        elif action.op is Op.BACKWARD and last in (Op.OFFLOAD, Op.VACATE):
            missing = _ORDER[_ORDER.index(last) + 1]
            raise refusal(plan, rank, index, f"expected {Action(missing, unit)} before it: its activations are away")
        elif not action.op.is_compute:
            continue
        done[unit] = action.op
    for unit, last in done.items():
        if last in _BEFORE:
            raise refusal(
                plan, rank, len(plan.ranks[rank]), f"{Action(Op.BACKWARD, unit)} is missing: {unit} went away"
            )


def _prove_as_stated(plan: Plan, rank: int, swap: Swap) -> None:
    actions, sizes = plan.ranks[rank], swap.bytes
    meant = {trip.unit for trip in swap.trips[rank]}
    for index, action in enumerate(actions):
        if action.op is Op.OFFLOAD and action.unit not in meant:
            raise refusal(plan, rank, index, f"the swap keeps {action.unit} on the device")
    gone = {action.unit for action in actions if action.op is Op.OFFLOAD}
    if gone != meant:
        raise refusal(plan, rank, len(actions), f"{Action(Op.OFFLOAD, min(meant - gone))} is missing")
    for index, now in enumerate(held_by_units(actions, sizes.held[rank], sizes.movable[rank])):
        if not now.device <= swap.budget[rank]:
            raise refusal(
                plan,
                rank,
                index,
                f"units in flight hold {now.device:,} bytes, above the {swap.budget[rank]:,.0f} that the swap states",
            )
