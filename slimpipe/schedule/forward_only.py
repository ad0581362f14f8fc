"""The plan of an evaluation: a schedule's forwards alone, in the order that every rank runs them in
(docs/evaluation.md).

Nothing waits for a backward, so nothing is kept for one. What a rank holds are keys and values: a microbatch's, in a
chunk, from its first slice on; its slots are free behind its last slice (`schedule.kv_slots`). That is n slots a chunk
whatever the schedule, and a training plan has at least as many: an evaluation runs in the same buffers.

The passes that follow take such a plan like any other: `balance` and `add_exchange` make loans in forward slots,
`add_vocabulary` gives it E, H, S and L, `lower` sends forwards only, `check(plan, forward_only=True)` proves it.
"""

from __future__ import annotations

from slimpipe.schedule.action import Op
from slimpipe.schedule.plan import Plan, PlanError


def forward_only(plan: Plan) -> Plan:
    """The forwards of a plan that `build` made, each rank's in its order.

    Raises PlanError for plans that have helpers, passes or transfers already: those were placed among backwards.
    """
    if plan.is_lowered or plan.has_vocabulary or plan.has_help:
        raise PlanError(f"{plan.name}: forward_only takes forwards and backwards alone, before all other passes")
    return Plan(plan.name, plan.shape, tuple(tuple(a for a in actions if a.op is Op.FORWARD) for actions in plan.ranks))
