"""Vocabulary passes in the simulator: collectives hold all ranks together, each communicator's one after another."""

from __future__ import annotations

from collections.abc import Sequence

from slimpipe.schedule.action import Action, Op
from slimpipe.schedule.collectives import COMMUNICATORS, Collective, Communicator, awaited_by, posted_by
from slimpipe.schedule.costs import LinkCost, VocabularyCosts
from slimpipe.schedule.flow import Event, Flow, Rule
from slimpipe.schedule.rendezvous import Rendezvous


class Meetings:
    """All collectives of a run. `cost` None: they take no time, but still wait for their last rank.

    One starts when every rank has posted it and its communicator is free, and takes the time of its tensor on a link.
    The statistics are too small to count.
    """

    def __init__(self, ranks: int, cost: LinkCost | None) -> None:
        self._rendezvous = Rendezvous(ranks)
        self._holds = cost.holds if cost else 0.0
        self._latency = cost.latency if cost else 0.0
        self._posted_at: dict[Collective, float] = {}
        self._free_at: dict[Communicator, float] = dict.fromkeys(COMMUNICATORS, 0.0)

    def post(self, flow: Flow, rank: int, collective: Collective, time: float) -> None:
        posted_at = self._posted_at[collective] = max(time, self._posted_at.get(collective, 0.0))
        if not self._rendezvous.post(rank, collective):
            return
        end = max(posted_at, self._free_at[collective.communicator])
        if collective.op is not Op.STATISTICS:
            # The gradient of the last stage's output is summed in fp32: twice the bytes of a tensor between stages.
            end += self._holds * (2 if collective.op is Op.GRADIENT else 1)
        self._free_at[collective.communicator] = end
        flow.post(collective, end + self._latency)

    def missing(self, collective: Collective) -> list[int]:
        """Ranks that have not posted it."""
        return self._rendezvous.missing(collective)


class PassRule(Rule):
    """A vocabulary pass waits for its collective, holds the rank for its duration, and posts the next collective."""

    def __init__(self, costs: VocabularyCosts, meetings: Meetings) -> None:
        self._costs = costs
        self._meetings = meetings

    def needs(self, flow: Flow, rank: int, action: Action) -> Sequence[Event]:
        collective = awaited_by(flow.plan.shape, rank, action)
        return () if collective is None else (collective,)

    def run(self, flow: Flow, rank: int, action: Action, start: float) -> float | None:
        end = start + self._costs.of(action.op)
        collective = posted_by(action)
        if collective is not None:
            self._meetings.post(flow, rank, collective, end)
        # H and G only post. The others hold their rank even where they cost nothing: they may have waited.
        return None if action.op in (Op.HIDDEN, Op.EMBED_GRAD_OUT) else end
