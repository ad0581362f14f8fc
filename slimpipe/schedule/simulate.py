"""The simulator: a plan, costs and links -> a timeline (DESIGN section 2, "The simulator").

Takes plans with and without transfer actions. Without, every tensor leaves the moment it is made and its consumer
always waits for it; with, it leaves at its send and no earlier than its receive is posted. No host or send window
is modelled here: `replay_in_order` answers whether those rules can stop a plan. Of a plan without vocabulary passes
the last stage's forwards make the loss and bear its cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slimpipe.schedule.action import Action, Op
from slimpipe.schedule.collectives import awaited_by
from slimpipe.schedule.costs import Costs, LinkCost
from slimpipe.schedule.flow import Event, Flow, Rule
from slimpipe.schedule.meetings import Meetings, PassRule
from slimpipe.schedule.plan import Plan, PlanError
from slimpipe.schedule.timeline import Timeline
from slimpipe.schedule.transfers import Link, ends, input_of, output_of
from slimpipe.schedule.wire import ReceiveRule, SendRule, Wires


def simulate(
    plan: Plan, costs: Costs, link: LinkCost | None = None, rules: Mapping[Op, Rule] | None = None
) -> Timeline:
    """Run the plan on paper. `link` None: transfers and collectives are free. `rules` adds to what operations do, or
    replaces it.

    Raises PlanError naming each rank's blocked action where the plan deadlocks.
    """
    wires = Wires(link)
    flow = Flow(plan, {**base_rules(plan, costs, wires, Meetings(plan.shape.p, link)), **(rules or {})})
    stuck = flow.run()
    if stuck:
        places = "; ".join(f"rank {s.rank} at action {s.at} ({s.action}) waits for {s.event}" for s in stuck)
        raise PlanError(f"deadlock: {places}")
    spans = tuple(tuple(spans) for spans in flow.spans)
    return Timeline(plan.name, plan.shape, spans, tuple(wires.transfers), link.tensor_bytes if link else 0)


def base_rules(plan: Plan, costs: Costs, wires: Wires, meetings: Meetings) -> dict[Op, Rule]:
    """Rules of all operations."""
    compute, send, receive = ComputeRule(plan, costs, wires), SendRule(wires), ReceiveRule(wires)
    rules: dict[Op, Rule] = dict.fromkeys(Op, PassRule(costs.vocabulary, meetings))
    return rules | {
        Op.FORWARD: compute,
        Op.BACKWARD: compute,
        Op.SEND_FORWARD: send,
        Op.SEND_BACKWARD: send,
        Op.RECV_FORWARD: receive,
        Op.RECV_BACKWARD: receive,
    }


class ComputeRule(Rule):
    """A forward or backward waits for its input, holds the rank for its duration, and makes its output.

    Where the plan has no sends, `wires` carries outputs to other ranks.
    """

    def __init__(self, plan: Plan, costs: Costs, wires: Wires) -> None:
        self._costs = costs
        self._wires = None if plan.is_lowered else wires
        self._in_passes = plan.has_vocabulary
        self._last = plan.shape.stages - 1

    def needs(self, flow: Flow, rank: int, action: Action) -> Sequence[Event]:
        shape = flow.plan.shape
        tensor = input_of(shape, rank, action)
        if tensor is not None:
            return (tensor,)
        # Without input from a stage it is the first's forward or the last's backward.
        collective = awaited_by(shape, rank, action) if self._in_passes else None
        return () if collective is None else (collective,)

    def run(self, flow: Flow, rank: int, action: Action, start: float) -> float:
        shape = flow.plan.shape
        stage = shape.stage(rank, action.unit.chunk)
        end = start + self._costs.of(stage, action)
        if stage == self._last and action.op is Op.FORWARD and not self._in_passes:
            end += self._costs.vocabulary.loss
        tensor = output_of(shape, rank, action)
        if tensor is not None:
            src, dst = ends(shape, tensor)
            if src == dst:
                flow.post(tensor, end)
            elif self._wires is not None:
                self._wires.carry(flow, Link(tensor.kind, src, dst), tensor, end)
        return end
