"""Compute orders: in which order each rank runs its forwards and backwards (docs/architecture.md).

| name        | forwards                                              | warm-up of rank r           |
|-------------|-------------------------------------------------------|-----------------------------|
| gpipe       | microbatches in turn                                  | all                         |
| 1f1b        | microbatches in turn                                  | p - 1 - r                   |
| interleaved | p microbatches through all chunks, then the next p    | 2 (p - 1 - r) + (v - 1) p   |
| slimpipe    | G slices of a microbatch through all chunks, the next | n v + 2 (p - 1 - r) - 1     |
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from slimpipe.schedule.action import Action, Op
from slimpipe.schedule.orders.base import Order, one_forward_one_backward
from slimpipe.schedule.orders.microbatch import GPipe, Interleaved, OneForwardOneBackward
from slimpipe.schedule.orders.slimpipe import SlimPipe
from slimpipe.schedule.plan import Plan, PlanError, Shape

_ORDERS: Final[Mapping[str, Order]] = MappingProxyType(
    {order.name: order for order in (GPipe(), OneForwardOneBackward(), Interleaved(), SlimPipe())}
)

BUILT: Final = tuple(_ORDERS)
NOT_BUILT: Final = ("terapipe", "seq1f1b", "zb_v", "v_half", "v_min")


def build(name: str, shape: Shape) -> Plan:
    """The named schedule's plan for `shape`: forwards and backwards alone, in each rank's order.

    Raises PlanError, naming the setting to change, where the schedule cannot run that shape or is not built.
    """
    reason = supported(name, shape)
    if reason is not None:
        raise PlanError(reason)
    order = _ORDERS[name]
    # The ranks of a schedule differ in warm-up alone, so they share their actions: 256 ranks cost no more objects.
    forwards = [Action(Op.FORWARD, unit) for unit in order.forwards(shape)]
    backwards = [Action(Op.BACKWARD, unit) for unit in order.backwards(shape)]
    warmups = (order.warmup(shape, rank) for rank in range(shape.p))
    return Plan(name, shape, tuple(one_forward_one_backward(forwards, backwards, warmup) for warmup in warmups))


def supported(name: str, shape: Shape) -> str | None:
    """None where `build(name, shape)` works; else why it does not, and which setting to change to what."""
    if name in NOT_BUILT:
        return f"pipeline.schedule = {name}: designed but not built; use one of {', '.join(BUILT)}"
    if name not in _ORDERS:
        return f"pipeline.schedule = {name}: unknown; use one of {', '.join(BUILT)}"
    return _ORDERS[name].refusal(shape)
