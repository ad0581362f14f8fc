"""No deadlock: the plan runs to its end where a forward or backward blocks until its input is there.

Sends do not block here. `replay_in_order` asks the harder question, under NCCL's rules.
"""

from __future__ import annotations

from slimpipe.schedule.action import Action, Op, Unit
from slimpipe.schedule.costs import equal_costs
from slimpipe.schedule.excerpt import refusal
from slimpipe.schedule.flow import Flow, Stuck
from slimpipe.schedule.plan import Plan, PlanError, Shape
from slimpipe.schedule.rendezvous import Meetings
from slimpipe.schedule.simulate import base_rules
from slimpipe.schedule.transfers import Tensor, ends
from slimpipe.schedule.wire import Wires


def prove_progress(plan: Plan) -> None:
    """Raises PlanError at the lowest stuck rank's action, and says what every stuck rank waits for."""
    stuck = Flow(plan, base_rules(plan, equal_costs(0.0, 0.0), Wires(None), Meetings(plan.shape.p, None))).run()
    if stuck:
        raise _deadlock(plan, stuck)


def _deadlock(plan: Plan, stuck: list[Stuck]) -> PlanError:
    waits = "; ".join(f"rank {s.rank} at action {s.at} ({s.action}) waits for {_wanted(plan, s)}" for s in stuck)
    return refusal(plan, stuck[0].rank, stuck[0].at, f"deadlock: {waits}")


def _wanted(plan: Plan, stuck: Stuck) -> str:
    if not isinstance(stuck.event, Tensor):
        return str(stuck.event)
    rank, compute = _maker(plan.shape, stuck.event)
    index = plan.ranks[rank].index(compute)
    return f"rank {rank}, action {index} ({compute})"


def _maker(shape: Shape, tensor: Tensor) -> tuple[int, Action]:
    unit = Unit(tensor.microbatch, tensor.slice, shape.place(tensor.stage)[1])
    return ends(shape, tensor)[0], Action(Op.FORWARD if tensor.kind == "F" else Op.BACKWARD, unit)
