"""Collectives as meetings of all ranks, in the order of posting: what the simulator and the replay share."""

from __future__ import annotations

from slimpipe.schedule.action import Action, Op
from slimpipe.schedule.collectives import COMMUNICATORS, Collective, Communicator, awaited_by, posted_by
from slimpipe.schedule.costs import LinkCost, VocabularyCosts
from slimpipe.schedule.flow import Event, Flow, Rule
from slimpipe.schedule.plan import PlanError


class Mismatch(PlanError):
    """Ranks have different collectives at the same place of a communicator's order. `met`: what the others have."""

    def __init__(self, posted: Collective, met: Collective) -> None:
        super().__init__(f"communicator {posted.communicator}: the {posted} meets the {met}")
        self.met = met


class Rendezvous:
    """Who has posted what. A collective is complete once the last rank has posted it; then so are all before it."""

    def __init__(self, ranks: int) -> None:
        self._order: dict[Communicator, list[Collective]] = {name: [] for name in COMMUNICATORS}
        self._posted: dict[Communicator, list[int]] = {name: [0] * ranks for name in COMMUNICATORS}
        self._missing: dict[Collective, int] = {}

    def post(self, rank: int, collective: Collective) -> bool:
        """Whether this completes it. Raises Mismatch where another rank has another one at this place."""
        order, posted = self._order[collective.communicator], self._posted[collective.communicator]
        at = posted[rank]
        posted[rank] += 1
        if at == len(order):
            order.append(collective)
            self._missing[collective] = len(posted)
        elif order[at] != collective:
            raise Mismatch(collective, order[at])
        self._missing[collective] -= 1
        return self._missing[collective] == 0

    def missing(self, collective: Collective) -> list[int]:
        """Ranks that have yet to post it."""
        order, posted = self._order[collective.communicator], self._posted[collective.communicator]
        at = order.index(collective) if collective in self._missing else len(order)
        return [rank for rank, count in enumerate(posted) if count <= at]


class Meetings:
    """Collectives of a simulated run. One of a communicator runs at a time, from when all ranks have posted it."""

    def __init__(self, ranks: int, link: LinkCost | None) -> None:
        self._rendezvous = Rendezvous(ranks)
        self._link = link
        self._posted_at: dict[Collective, float] = {}
        self._free_at: dict[Communicator, float] = dict.fromkeys(COMMUNICATORS, 0.0)

    def post(self, flow: Flow, rank: int, collective: Collective, time: float) -> None:
        posted_at = max(time, self._posted_at.get(collective, 0.0))
        self._posted_at[collective] = posted_at
        if not self._rendezvous.post(rank, collective):
            return
        name, link = collective.communicator, self._link
        free_at = max(posted_at, self._free_at[name])
        latency = 0.0
        if link is not None and collective.op is not Op.STATISTICS:
            # The output's gradient is summed in fp32: twice the bytes of a tensor.
            free_at += link.holds * (2 if collective.op is Op.GRADIENT else 1)
            latency = link.latency
        self._free_at[name] = free_at
        flow.post(collective, free_at + latency)


class PassRule(Rule):
    """A vocabulary pass waits for its collective, holds the rank for its duration, and posts the next one."""

    def __init__(self, costs: VocabularyCosts, meetings: Meetings) -> None:
        self._costs = costs
        self._meetings = meetings

    def needs(self, flow: Flow, rank: int, action: Action) -> tuple[Event, ...]:
        collective = awaited_by(flow.plan.shape, rank, action)
        return () if collective is None else (collective,)

    def run(self, flow: Flow, rank: int, action: Action, start: float) -> float | None:
        end = start + self._costs.of(action.op)
        collective = posted_by(action)
        if collective is not None:
            self._meetings.post(flow, rank, collective, end)
        # H and G do nothing else; what waits holds its rank even where it costs nothing.
        return None if action.op in (Op.HIDDEN, Op.EMBED_GRAD_OUT) else end
