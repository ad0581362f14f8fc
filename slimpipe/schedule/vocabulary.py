"""The vocabulary pass: adds the passes of embedding and output layer to every rank's list (DESIGN section 5).

Each pass of a slice gets a place in the list of the rank that leads it, hence a moment in time, and stands on every
other rank at that moment. All ranks carry all passes out in one order of moments, and a forward or backward that needs
a pass never stands before it: so no order of waiting can close a circle, and the collectives of a communicator come in
the same order everywhere.

Output layer, by the last rank's list, with F and B of its last chunk:

| pass | stands                                                                                     |
|------|--------------------------------------------------------------------------------------------|
| H    | right after F                                                                              |
| S    | two actions after F, so that the broadcast runs beside a forward and a backward             |
| T    | two actions after S, or right before the next slice's S if that comes first                |
|      | both no later than one action before B, so that T's reduce runs beside that                |

So one logits shard a rank is alive at a time (a second would gain 0.1 % of a step), and up to four slices of the last
stage's output. Where B follows F at once (the last slice of a microbatch; every slice if n = 1) S and T follow H at once
and all ranks wait; the passes of the slice before stand there too and fill part of that. With one action between F and
B, S and T stand right before B.

Embedding, by rank 0's list: E three actions ahead of F, G right after B, D four actions after that. So up to four
embeddings wait on rank 0, and five gradients on any rank.

**Why two, three and four, and why the latest times.** Passes bind all ranks together, so each should find the others at
the same moment with time to spare. As early as it can a rank runs ahead of its phase, and then the last slice of a
microbatch finds others in mid-backward: so moments are those of the latest times (`latest`). What a step takes beyond
an even split of the output layer, simulated (benchmarks/vocabulary_simulation.py has the costs; m = 4):

| p, n, v                            | 2, 8, 1 | 8, 32, 1 | 16, 64, 1 | 8, 32, 2 | 8, 8, 1 | 4, 6, 3 |
|------------------------------------|---------|----------|-----------|----------|---------|---------|
| attention evened out by exchange   | 0.1 %   | 0.2 %    | 0.2 %     | 0.2 %    | 1.3 %   | 0.1 %   |
| - moments of the earliest times    | 3.7 %   | 1.5 %    | 0.8 %     | 0.7 %    | 5.3 %   | 1.9 %   |
| - E, S, T and D at one action       | 0.1 %   | 1.0 %    | 25.7 %    | 4.4 %    | 4.1 %   | 2.1 %   |
| attention by slice, no exchange    | -0.4 %  | -0.2 %   | 0.0 %     | 0.0 %    | 3.0 %   | 0.0 %   |
| - only E and D at one action       | 2.2 %   | 16.8 %   | 16.7 %    | 6.6 %    | 13.2 %  | 4.7 %   |
| - `costs` equal, which is wrong    | 0.4 %   | 4.3 %    | 6.2 %     | -0.1 %   | 8.3 %   | 1.2 %   |
| - `costs` with 1.2 times the share | -0.4 %  | 1.6 %    | 2.9 %     | 0.2 %    | 5.4 %   | -0.1 %  |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from slimpipe.schedule.action import Action, Op, Unit
from slimpipe.schedule.costs import Costs, VocabularyCosts, equal_costs
from slimpipe.schedule.flow import Span
from slimpipe.schedule.latest import latest_spans
from slimpipe.schedule.plan import Plan, PlanError

BROADCAST_BESIDE = 2
"""Actions of the last rank between H and S."""
STATISTICS_BESIDE = 2
"""Actions of the last rank between S and T, at most."""
EMBED_AHEAD = 3
"""Actions of rank 0 between E and the forward that waits for it."""
EMBED_GRAD_BESIDE = 4
"""Actions of rank 0 between G and D."""


def add_vocabulary(plan: Plan, costs: Costs | None = None) -> Plan:
    """The plan with E, H, S, T, G and D of every slice on every rank; `lower` comes after.

    `costs`: of forwards and backwards, as far as known, to tell which actions of different ranks coincide. By default all
    slices cost the same and a backward two forwards; where attention grows with the prefix and no exchange evens it out,
    give `sliced_costs`. Every rank must be given the same. Raises PlanError where there is nothing to share (p = 1), and
    for plans that have passes or transfers already.
    """
    if plan.shape.p == 1:
        raise PlanError("pipeline.vocab_parallel = true needs parallel.pp >= 2: one rank has nobody to share with")
    if plan.is_lowered or plan.has_vocabulary:
        what = "sends and receives" if plan.is_lowered else "vocabulary passes"
        raise PlanError(f"{plan.name}: has {what} already; add_vocabulary takes forwards and backwards alone")
    # The passes take their share of every rank alike: to compare ranks, they may be left out.
    costs = replace(costs or equal_costs(), vocabulary=VocabularyCosts())
    spans = latest_spans(plan, costs)
    passes = sorted([*_output(plan, _List(spans[-1])), *_embedding(plan, _List(spans[0]))])
    # In exact arithmetic many moments are equal; rounding must not move a pass behind the action that starts with it.
    margin = 1e-6 * min(span.end - span.start for row in spans for span in row)
    return Plan(plan.name, plan.shape, tuple(tuple(_merge(row, passes, margin)) for row in spans))


class _Pass(NamedTuple):
    """Sorts by time, and at the same time in the order in which ranks should post: what others wait for comes first."""

    time: float
    priority: int
    turn: int
    action: Action


class _List:
    """A leading rank's actions, and the moments between them."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._at = {span.action: index for index, span in enumerate(spans)}

    def index(self, op: Op, unit: Unit) -> int:
        return self._at[Action(op, unit)]

    def before(self, index: int) -> float:
        """The moment at which the actions in front of `index` are done; past the end of the list, its end."""
        return self._spans[min(index, len(self._spans)) - 1].end if index > 0 else 0.0


def _output(plan: Plan, last: _List) -> Iterator[_Pass]:
    """H, S and T of all slices, by the last rank's list."""
    places: list[tuple[int, int, int, Unit]] = []
    for microbatch in range(plan.shape.m):
        for slice_ in range(plan.shape.n):
            unit = Unit(microbatch, slice_, plan.shape.v - 1)
            f, d = last.index(Op.FORWARD, unit), last.index(Op.BACKWARD, unit)
            yield _Pass(last.before(f + 1), 2, f, Action(Op.HIDDEN, unit))
            # Right before which action S and T stand at the latest.
            due = d if d - f <= 2 else d - 1
            statistics = min(f + 1 + BROADCAST_BESIDE, due)
            places.append((statistics, f, min(statistics + STATISTICS_BESIDE, due), unit))
    places.sort()
    next_statistics = [place[0] for place in places[1:]] + [len(plan.ranks[-1])]
    for turn, ((statistics, _, gradient, unit), next_) in enumerate(zip(places, next_statistics, strict=True)):
        yield _Pass(last.before(statistics), 3, 2 * turn, Action(Op.STATISTICS, unit))
        yield _Pass(last.before(min(gradient, next_)), 3, 2 * turn + 1, Action(Op.GRADIENT, unit))


def _embedding(plan: Plan, first: _List) -> Iterator[_Pass]:
    """E, G and D of all slices, by rank 0's list."""
    for microbatch in range(plan.shape.m):
        for slice_ in range(plan.shape.n):
            unit = Unit(microbatch, slice_, 0)
            f, d = first.index(Op.FORWARD, unit), first.index(Op.BACKWARD, unit)
            yield _Pass(first.before(f - EMBED_AHEAD), 0, f, Action(Op.EMBED, unit))
            yield _Pass(first.before(d + 1), 1, d, Action(Op.EMBED_GRAD_OUT, unit))
            yield _Pass(first.before(d + 1 + EMBED_GRAD_BESIDE), 4, d, Action(Op.EMBED_GRAD, unit))


def _merge(spans: Sequence[Span], passes: Sequence[_Pass], margin: float) -> Iterator[Action]:
    """A rank's actions, each behind the passes of its starting time and before."""
    at = 0
    for span in spans:
        while at < len(passes) and passes[at].time <= span.start + margin:
            yield passes[at].action
            at += 1
        yield span.action
    for pass_ in passes[at:]:
        yield pass_.action
