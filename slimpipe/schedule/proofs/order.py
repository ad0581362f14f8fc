"""On a rank and chunk, slices of a microbatch run forward ascending and backward descending.

Forward, a slice attends to the keys and values of all earlier ones; backward, its dK and dV are complete only when
all later ones have added theirs. A wrong order raises no error while it trains: it gives wrong gradients.
"""

from __future__ import annotations

from slimpipe.schedule.action import Action, Op, Unit
from slimpipe.schedule.excerpt import refusal
from slimpipe.schedule.plan import Plan


def prove_slice_order(plan: Plan) -> None:
    """Raises PlanError at the first slice out of turn. Relies on `prove_units`."""
    last = plan.shape.n - 1
    for rank, actions in enumerate(plan.ranks):
        due: dict[tuple[Op, int, int], int] = {}
        for index, action in enumerate(actions):
            if not action.op.is_compute:
                continue
            unit, forward = action.unit, action.op is Op.FORWARD
            key = (action.op, unit.microbatch, unit.chunk)
            expected = due.get(key, 0 if forward else last)
            if unit.slice != expected:
                token = Action(action.op, Unit(unit.microbatch, expected, unit.chunk))
                rule = "forward ascending" if forward else "backward descending"
                raise refusal(plan, rank, index, f"expected {token}: slices of a microbatch run {rule}")
            due[key] = expected + 1 if forward else expected - 1
