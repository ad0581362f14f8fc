"""Each rank runs each of its units forward once and backward once, the backward after the forward.

In an evaluation's plan: forward once, and nothing backward.
"""

from __future__ import annotations

from slimpipe.schedule.action import Action, Op, Unit
from slimpipe.schedule.excerpt import refusal
from slimpipe.schedule.plan import Plan, Shape


def prove_units(plan: Plan, forward_only: bool = False) -> None:
    """Raises PlanError at a unit that is outside the shape, run twice, backward too early or where none should be, or
    missing."""
    for rank, actions in enumerate(plan.ranks):
        forward_at: dict[Unit, int] = {}
        backward_at: dict[Unit, int] = {}
        for index, action in enumerate(actions):
            if not in_shape(plan.shape, action.unit):
                shape = plan.shape
                expected = f"microbatch < {shape.m}, slice < {shape.n}, chunk < {shape.v}"
                raise refusal(plan, rank, index, f"unit {action.unit} is outside the shape: expected {expected}")
            if not action.op.is_compute:
                continue
            if action.op is Op.BACKWARD and forward_only:
                raise refusal(plan, rank, index, "expected no backward in an evaluation's plan")
            seen_at = forward_at if action.op is Op.FORWARD else backward_at
            if action.unit in seen_at:
                first = seen_at[action.unit]
                raise refusal(plan, rank, index, f"expected each unit once, but action {first} is {action} too")
            if action.op is Op.BACKWARD and action.unit not in forward_at:
                forward = Action(Op.FORWARD, action.unit)
                raise refusal(plan, rank, index, f"backward before its forward: expected {forward} earlier in the list")
            seen_at[action.unit] = index
        for op, seen_at in ((Op.FORWARD, forward_at), (Op.BACKWARD, backward_at))[: 1 if forward_only else 2]:
            missing = next((unit for unit in _units(plan.shape) if unit not in seen_at), None)
            if missing is not None:
                raise refusal(plan, rank, len(actions), f"{Action(op, missing)} is missing: expected each unit once")


def in_shape(shape: Shape, unit: Unit) -> bool:
    return 0 <= unit.microbatch < shape.m and 0 <= unit.slice < shape.n and 0 <= unit.chunk < shape.v


def _units(shape: Shape) -> list[Unit]:
    return [Unit(m, i, c) for m in range(shape.m) for i in range(shape.n) for c in range(shape.v)]
