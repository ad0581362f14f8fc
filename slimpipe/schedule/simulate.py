"""The simulator: a plan, costs and links -> a timeline (docs/architecture.md).

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
from slimpipe.schedule.gatherings import Gatherings, HelpRule
from slimpipe.schedule.host_link import HostLinks, OffloadRule, ReloadRule, VacateRule
from slimpipe.schedule.meetings import Meetings, PassRule
from slimpipe.schedule.plan import Plan, PlanError, Shape
from slimpipe.schedule.timeline import Timeline
from slimpipe.schedule.transfers import Link, ends, input_of, output_of
from slimpipe.schedule.wire import ReceiveRule, SendRule, Wires


def simulate(
    plan: Plan,
    costs: Costs,
    link: LinkCost | None = None,
    rules: Mapping[Op, Rule] | None = None,
    gatherings: Gatherings | None = None,
    host: HostLinks | None = None,
) -> Timeline:
    """Run the plan on paper. `link` None: transfers and collectives are free. `rules` adds to what operations do, or
    replaces it. `gatherings`: the plan's exchange, and what its slots take where `costs` do not say it. `host`: what
    swaps take; None: nothing.

    Raises PlanError naming each rank's blocked action where the plan deadlocks.
    """
    wires = Wires(link)
    host = host or HostLinks(plan.shape.p)
    base = base_rules(plan, costs, wires, Meetings(plan.shape.p, link), gatherings, host)
    flow = Flow(plan, {**base, **(rules or {})})
    stuck = flow.run()
    if stuck:
        places = "; ".join(f"rank {s.rank} at action {s.at} ({s.action}) waits for {s.event}" for s in stuck)
        raise PlanError(f"deadlock: {places}")
    spans = tuple(tuple(spans) for spans in flow.spans)
    waited = tuple(gatherings.waited) if gatherings else ()
    tensor_bytes = link.tensor_bytes if link else 0
    return Timeline(
        plan.name,
        plan.shape,
        spans,
        tuple(wires.transfers),
        tensor_bytes,
        waited,
        tuple(host.copies),
        tuple(host.waited),
        tuple(host.keys_waited),
    )


def base_rules(
    plan: Plan,
    costs: Costs,
    wires: Wires,
    meetings: Meetings,
    gatherings: Gatherings | None = None,
    host: HostLinks | None = None,
) -> dict[Op, Rule]:
    """Rules of all operations. Raises PlanError where helpers are not told whom they help."""
    if gatherings is None and plan.has_help:
        raise PlanError(f"{plan.name}: has helper actions (XF, XB); pass the exchange that they belong to")
    host = host or HostLinks(plan.shape.p)
    compute, send, receive = ComputeRule(plan, costs, wires, gatherings, host), SendRule(wires), ReceiveRule(wires)
    rules: dict[Op, Rule] = dict.fromkeys(Op, PassRule(costs.vocabulary, meetings))
    if gatherings is not None:
        rules |= dict.fromkeys((Op.HELP_FORWARD, Op.HELP_BACKWARD), HelpRule(gatherings))
    return rules | {
        Op.FORWARD: compute,
        Op.BACKWARD: compute,
        Op.SEND_FORWARD: send,
        Op.SEND_BACKWARD: send,
        Op.RECV_FORWARD: receive,
        Op.RECV_BACKWARD: receive,
        Op.OFFLOAD: OffloadRule(host),
        Op.VACATE: VacateRule(host),
        Op.RELOAD: ReloadRule(host),
    }


class ComputeRule(Rule):
    """A forward or backward waits for its input, holds the rank for its duration, and makes its output.

    Where the plan has no sends, `wires` carries outputs to other ranks. With loans it waits for its group too, which
    then sets its duration. A backward also waits for activations that come back from the host, and each layer of either
    for keys and values that do.
    """

    def __init__(self, plan: Plan, costs: Costs, wires: Wires, gatherings: Gatherings | None, host: HostLinks) -> None:
        self._costs = costs
        self._gatherings = gatherings
        self._host = host
        self._arrived = [0.0] * plan.shape.p
        self._wires = None if plan.is_lowered else wires
        self._in_passes = plan.has_vocabulary
        self._last = plan.shape.stages - 1

    def arrive(self, flow: Flow, rank: int, action: Action, time: float) -> None:
        self._arrived[rank] = time
        if self._gatherings is not None:
            self._gatherings.arrive(rank, time)

    def needs(self, flow: Flow, rank: int, action: Action) -> Sequence[Event]:
        inputs = (*self._inputs(flow.plan.shape, rank, action), *self._host.awaited_by(rank, action))
        return inputs if self._gatherings is None else self._gatherings.needs(flow, rank, action, inputs)

    def _inputs(self, shape: Shape, rank: int, action: Action) -> Sequence[Event]:
        tensor = input_of(shape, rank, action)
        if tensor is not None:
            return (tensor,)
        # Without input from a stage it is the first's forward or the last's backward.
        collective = awaited_by(shape, rank, action) if self._in_passes else None
        return () if collective is None else (collective,)

    def run(self, flow: Flow, rank: int, action: Action, start: float) -> float:
        shape = flow.plan.shape
        for copied in self._host.awaited_by(rank, action):
            others = [flow.when(event) or 0.0 for event in self._inputs(shape, rank, action)]
            self._host.wait(rank, max([self._arrived[rank], *others]), flow.when(copied) or 0.0)
        stage = shape.stage(rank, action.unit.chunk)
        stay = self._gatherings.stay(rank, action) if self._gatherings is not None else None
        end = start + (self._costs.of(stage, action) if stay is None else stay.until)
        end = self._host.end_of(flow, rank, action, start, end)
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
