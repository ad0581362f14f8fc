"""The simulator: a plan, costs and links -> a timeline (DESIGN section 2, "The simulator").

Takes plans with and without transfer actions. Without, every tensor leaves the moment it is made and its consumer
always waits for it; with, it leaves at its send and no earlier than its receive is posted. No host or send window
is modelled here: `replay_in_order` answers whether those rules can stop a plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slimpipe.schedule.action import Action, Op
from slimpipe.schedule.costs import Costs, LinkCost
from slimpipe.schedule.flow import Event, Flow, Rule
from slimpipe.schedule.plan import Plan, PlanError
from slimpipe.schedule.timeline import Timeline
from slimpipe.schedule.transfers import Link, ends, input_of, output_of
from slimpipe.schedule.wire import ReceiveRule, SendRule, Wires


def simulate(
    plan: Plan, costs: Costs, link: LinkCost | None = None, rules: Mapping[Op, Rule] | None = None
) -> Timeline:
    """Run the plan on paper. `link` None: transfers are free. `rules` adds or replaces what operations do.

    Raises PlanError naming each rank's blocked action where the plan deadlocks.
    """
    wires = Wires(link)
    flow = Flow(plan, {**base_rules(plan, costs, wires), **(rules or {})})
    stuck = flow.run()
    if stuck:
        places = "; ".join(f"rank {s.rank} at action {s.at} ({s.action}) waits for {s.event}" for s in stuck)
        raise PlanError(f"deadlock: {places}")
    spans = tuple(tuple(spans) for spans in flow.spans)
    return Timeline(plan.name, plan.shape, spans, tuple(wires.transfers), link.tensor_bytes if link else 0)


def base_rules(plan: Plan, costs: Costs, wires: Wires) -> dict[Op, Rule]:
    """Rules of the operations that every schedule has."""
    compute, send, receive = ComputeRule(costs, None if plan.is_lowered else wires), SendRule(wires), ReceiveRule(wires)
    return {
        Op.FORWARD: compute,
        Op.BACKWARD: compute,
        Op.SEND_FORWARD: send,
        Op.SEND_BACKWARD: send,
        Op.RECV_FORWARD: receive,
        Op.RECV_BACKWARD: receive,
    }


class ComputeRule(Rule):
    """A forward or backward waits for its input, holds the rank for its duration, and makes its output.

    `wires` carries outputs to other ranks where the plan has no sends to do it; None where it has.
    """

    def __init__(self, costs: Costs, wires: Wires | None) -> None:
        self._costs = costs
        self._wires = wires

    def needs(self, flow: Flow, rank: int, action: Action) -> Sequence[Event]:
        tensor = input_of(flow.plan.shape, rank, action)
        return () if tensor is None else (tensor,)

    def run(self, flow: Flow, rank: int, action: Action, start: float) -> float:
        shape = flow.plan.shape
        end = start + self._costs.of(shape.stage(rank, action.unit.chunk), action)
        tensor = output_of(shape, rank, action)
        if tensor is not None:
            src, dst = ends(shape, tensor)
            if src == dst:
                flow.post(tensor, end)
            elif self._wires is not None:
                self._wires.carry(flow, Link(tensor.kind, src, dst), tensor, end)
        return end
