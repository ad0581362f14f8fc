"""No deadlock: the plan runs to its end where an action blocks until its input, its collective or its group is there.

Sends do not block here. `replay_in_order` asks the harder question, under NCCL's rules.
"""

from __future__ import annotations

from slimpipe.schedule.action import Action, Op, Unit
from slimpipe.schedule.collectives import Collective, poster
from slimpipe.schedule.costs import equal_costs
from slimpipe.schedule.excerpt import refusal
from slimpipe.schedule.flow import Flow, Stuck
from slimpipe.schedule.gatherings import Gathered, Gatherings
from slimpipe.schedule.loans import Exchange
from slimpipe.schedule.meetings import Meetings
from slimpipe.schedule.plan import Plan, PlanError, Shape
from slimpipe.schedule.simulate import base_rules
from slimpipe.schedule.slot_times import InEqualTime
from slimpipe.schedule.transfers import Tensor, ends
from slimpipe.schedule.wire import Wires


def prove_progress(plan: Plan, exchange: Exchange | None = None) -> None:
    """Raises PlanError at the lowest stuck rank's action, and says what every stuck rank waits for."""
    meetings = Meetings(plan.shape.p, None)
    gatherings = Gatherings(exchange, InEqualTime(0.0)) if exchange is not None else None
    stuck = Flow(plan, base_rules(plan, equal_costs(0.0, 0.0), Wires(None), meetings, gatherings)).run()
    if stuck:
        raise _deadlock(plan, stuck, meetings, gatherings)


def _deadlock(plan: Plan, stuck: list[Stuck], meetings: Meetings, gatherings: Gatherings | None) -> PlanError:
    waits = "; ".join(
        f"rank {s.rank} at action {s.at} ({s.action}) waits for {_wanted(plan, s, meetings, gatherings)}" for s in stuck
    )
    return refusal(plan, stuck[0].rank, stuck[0].at, f"deadlock: {waits}")


def _wanted(plan: Plan, stuck: Stuck, meetings: Meetings, gatherings: Gatherings | None) -> str:
    if isinstance(stuck.event, Tensor):
        return _place(plan, *_maker(plan.shape, stuck.event))
    if isinstance(stuck.event, Collective):
        post = poster(plan.shape, stuck.event)
        return ", ".join(_place(plan, rank, post) for rank in meetings.missing(stuck.event))
    if isinstance(stuck.event, Gathered) and gatherings is not None:
        missing = ", ".join(f"rank {rank}" for rank in gatherings.missing(stuck.event))
        return f"{missing} in the {stuck.event.slot}"
    return str(stuck.event)


def _place(plan: Plan, rank: int, action: Action) -> str:
    return f"rank {rank}, action {plan.ranks[rank].index(action)} ({action})"


def _maker(shape: Shape, tensor: Tensor) -> tuple[int, Action]:
    unit = Unit(tensor.microbatch, tensor.slice, shape.place(tensor.stage)[1])
    return ends(shape, tensor)[0], Action(Op.FORWARD if tensor.kind == "F" else Op.BACKWARD, unit)
