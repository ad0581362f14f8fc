"""Ranks walk their lists: the event-driven core of the simulator and of the checker's search for deadlocks.

A rank runs its actions one after another. What an action waits for, how long it takes and what it sets free is the
business of its operation's `Rule`; the flow only knows that events happen at times. A pass that adds an operation
(loans, vocabulary passes, swaps) adds a Rule, and nothing here changes: a barrier is a rule that posts an event as
each rank arrives and needs the events of all.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from slimpipe.schedule.action import Action, Op
from slimpipe.schedule.plan import Plan, PlanError

Event = Hashable


class Span(NamedTuple):
    """An action that held its rank from `start` to `end`."""

    action: Action
    start: float
    end: float


class Stuck(NamedTuple):
    """A rank that cannot go on: its next action and where in its list that stands, and the event that never happens."""

    rank: int
    at: int
    action: Action
    event: Event


class Rule:
    """What one operation does. The defaults: waits for nothing, takes no time."""

    def arrive(self, flow: Flow, rank: int, action: Action, time: float) -> None:
        """The rank has come to the action and is free. Called once, before the first `needs`."""

    def needs(self, flow: Flow, rank: int, action: Action) -> Sequence[Event]:
        """Events that must have happened before the action starts."""
        return ()

    def run(self, flow: Flow, rank: int, action: Action, start: float) -> float | None:
        """Post what the action sets free. Returns when the rank is free again, or None if it never was held."""
        return None


class Flow:
    """One run of a plan under a set of rules. `run` walks every rank as far as it can."""

    def __init__(self, plan: Plan, rules: Mapping[Op, Rule]) -> None:
        self.plan = plan
        self.rules = rules
        self.spans: list[list[Span]] = [[] for _ in plan.ranks]
        self._next = [0] * len(plan.ranks)
        self._arrived = [-1] * len(plan.ranks)
        self._free_at = [0.0] * len(plan.ranks)
        self._happened: dict[Event, float] = {}
        self._waiting: dict[Event, list[int]] = {}
        self._ready = list(range(len(plan.ranks)))

    def post(self, event: Event, time: float) -> None:
        """The event happens at `time`. It may lie ahead of what its waiters have reached; each happens once."""
        if event in self._happened:
            raise PlanError(f"{event}: happened twice; run schedule.check on the plan")
        self._happened[event] = time
        self._ready.extend(self._waiting.pop(event, ()))

    def when(self, event: Event) -> float | None:
        """When the event happens; None while that is not known."""
        return self._happened.get(event)

    def run(self) -> list[Stuck]:
        """Walk until no rank can go on. Returns the ranks that did not finish; none in a sound plan."""
        while self._ready:
            self._walk(self._ready.pop())
        return sorted(
            Stuck(rank, self._next[rank], self.plan.ranks[rank][self._next[rank]], event)
            for event, ranks in self._waiting.items()
            for rank in ranks
        )

    def _walk(self, rank: int) -> None:
        actions, happened, spans = self.plan.ranks[rank], self._happened, self.spans[rank]
        for index in range(self._next[rank], len(actions)):
            self._next[rank] = index
            action = actions[index]
            rule = self.rules[action.op]
            start = self._free_at[rank]
            if self._arrived[rank] < index:
                self._arrived[rank] = index
                rule.arrive(self, rank, action, start)
            for event in rule.needs(self, rank, action):
                time = happened.get(event)
                if time is None:
                    self._waiting.setdefault(event, []).append(rank)
                    return
                start = max(start, time)
            end = rule.run(self, rank, action, start)
            if end is not None:
                self._free_at[rank] = end
                spans.append(Span(action, start, end))
        self._next[rank] = len(actions)
