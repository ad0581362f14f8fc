"""The vocabulary pass: adds the passes of embedding and output layer to every rank's list (docs/vocabulary.md).

Each pass of a slice gets a place in the list of the rank that leads it, hence a moment in time, and stands on every
other rank at that moment. All ranks carry all passes out in one order of moments, and a forward or backward that needs
a pass never stands before it: so no order of waiting can close a circle, and the collectives of a communicator come in
the same order everywhere.

Output layer, by the last rank's list, with F and B of its last chunk:

| pass | stands                                                                                    |
|------|-------------------------------------------------------------------------------------------|
| H    | right after F                                                                             |
| S    | two actions after F, so that the broadcast runs beside a forward and a backward            |
| T    | two actions after S, or right before the next slice's S if that comes first               |
|      | both no later than one action before B, so that T's reduce runs beside that               |

So one logits shard a rank is alive at a time (a second would gain 0.1 % of a step), and up to four slices of the last
stage's output. Where B follows F at once (the last slice of a microbatch; every slice if n = 1) S and T follow H at
once, and all ranks wait; the passes of the slice before stand there too and fill part of that. With one action between
F and B, S and T stand right before B. An evaluation has no B to be in time for, and L in the place of T.

Embedding, by rank 0's list: E three actions ahead of F, G right after B, D four actions after that. So up to four
embeddings wait on rank 0, and five gradients on any rank.

**Which moments.** A pass should find all ranks at the end of an action, with time to spare. slimpipe's ranks can be in
phase, all in a forward or all in a backward (`slots`), and are where their costs are even: there passes cost nothing
but the transfers that nothing can hide. As early as it can, though, a rank runs out of phase, and the last slice of a
microbatch finds others in mid-backward. Where attention makes slices cost more and more and no exchange evens that
out, ranks are never in phase; `halfway` between their earliest and latest times is then the safest place, as a rule.
What a step takes beyond an even split of the output layer, simulated (m = 4; costs and links as in
benchmarks/vocabulary_simulation.py):

| p, n, v                                   | 2, 8, 1 | 8, 32, 1 | 16, 64, 1 | 8, 32, 2 | 8, 8, 1 | 4, 6, 3 | 8, 1, 1 |
|-------------------------------------------|---------|----------|-----------|----------|---------|---------|---------|
| attention evened out by exchange          |  0.06 % |   0.04 % |    0.03 % |   0.03 % |  0.10 % |  0.08 % |  0.48 % |
| - moments of the earliest times           |  3.70 % |   1.42 % |    1.03 % |   0.67 % |  4.87 % |  1.74 % | 11.86 % |
| attention by slice, `costs` given         | -0.40 % |  -0.43 % |   -0.21 % |  -0.20 % | -0.36 % |  0.04 % |  0.48 % |
| - `costs` with 1.2 times the share        | -0.35 % |  -0.43 % |    0.11 % |  -0.20 % | -0.36 % | -0.05 % |  0.48 % |
| - no `costs`: in phase                    |  0.96 % |   2.61 % |    3.51 % |  -0.17 % |  4.99 % |  1.48 % |  0.48 % |
| - `costs`; E, S, T and D at one action    |  0.47 % |   4.74 % |    6.28 % |   0.20 % |  9.01 % |  1.56 % |  0.48 % |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from slimpipe.schedule.action import Action, Op, Unit
from slimpipe.schedule.costs import Costs, VocabularyCosts, equal_costs
from slimpipe.schedule.flow import Span
from slimpipe.schedule.in_flight import is_forward_only
from slimpipe.schedule.in_phase import slot_spans
from slimpipe.schedule.plan import Plan, PlanError
from slimpipe.schedule.simulate import simulate
from slimpipe.schedule.slack import Spans, earliest, halfway, latest
from slimpipe.schedule.slots import Slots, slots_of

BROADCAST_BESIDE = 2
"""Actions of the last rank between H and S."""
STATISTICS_BESIDE = 2
"""Actions of the last rank between S and T, at most."""
EMBED_AHEAD = 3
"""Actions of rank 0 between E and the forward that waits for it."""
EMBED_GRAD_BESIDE = 4
"""Actions of rank 0 between G and D."""


def add_vocabulary(plan: Plan, costs: Costs | None = None, slots: Slots | None = None) -> Plan:
    """The plan with E, H, S, T, G and D of every slice on every rank (E, H, S and L of an evaluation's); `lower` comes
    after.

    By default the ranks of a slimpipe plan are taken to be in phase. `costs`: of forwards, backwards and, if known, of
    passes, where attention grows with the prefix and no exchange evens it out (`sliced_costs`); the places are then
    chosen by simulation, and every rank must be given the same costs. `slots`: of a plan with exchange
    (`add_exchange`), which keeps its ranks in phase whatever they cost.

    Raises PlanError where there is nothing to share (p = 1), and for plans that have passes or transfers already.
    """
    if plan.shape.p == 1:
        raise PlanError("pipeline.vocab_parallel = true needs parallel.pp >= 2: one rank has nobody to share with")
    if plan.is_lowered or plan.has_vocabulary:
        what = "sends and receives" if plan.is_lowered else "vocabulary passes"
        raise PlanError(f"{plan.name}: has {what} already; add_vocabulary comes before")
    in_phase = slots or (slots_of(plan) if plan.name == "slimpipe" else None)
    timelines = [slot_spans(plan, in_phase)] if in_phase else []
    if slots is None and (costs or not in_phase):
        costs = costs or equal_costs()
        # The passes take the same of every rank: to compare ranks, they may be left out.
        alone = replace(costs, vocabulary=VocabularyCosts())
        early = earliest(plan, alone)
        late = latest(plan, early)
        timelines += [halfway(early.spans, late), late]
        return min((_place(plan, spans) for spans in timelines), key=lambda placed: simulate(placed, costs).makespan)
    return _place(plan, timelines[0])


def _place(plan: Plan, spans: Spans) -> Plan:
    """The plan with its passes placed by a timeline of its actions."""
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
        self.forward_only = is_forward_only(self._at)

    def index(self, op: Op, unit: Unit) -> int:
        return self._at[Action(op, unit)]

    def before(self, index: int) -> float:
        """The moment at which the actions in front of `index` are done; past the end of the list, its end."""
        return self._spans[min(index, len(self._spans)) - 1].end if index > 0 else 0.0


def _output(plan: Plan, last: _List) -> Iterator[_Pass]:
    """H, S and T (L where there are no backwards) of all slices, by the last rank's list."""
    ends, end = len(plan.ranks[-1]), Op.LOSS if last.forward_only else Op.GRADIENT
    places: list[tuple[int, int, int, Unit]] = []
    for microbatch in range(plan.shape.m):
        for slice_ in range(plan.shape.n):
            unit = Unit(microbatch, slice_, plan.shape.v - 1)
            f = last.index(Op.FORWARD, unit)
            yield _Pass(last.before(f + 1), 2, f, Action(Op.HIDDEN, unit))
            # Right before which action S and T stand at the latest.
            d = ends + 1 if last.forward_only else last.index(Op.BACKWARD, unit)
            due = d if d - f <= 2 else d - 1
            statistics = min(f + 1 + BROADCAST_BESIDE, due)
            places.append((statistics, f, min(statistics + STATISTICS_BESIDE, due), unit))
    places.sort()
    next_statistics = [place[0] for place in places[1:]] + [ends]
    for turn, ((statistics, _, gradient, unit), next_) in enumerate(zip(places, next_statistics, strict=True)):
        yield _Pass(last.before(statistics), 3, 2 * turn, Action(Op.STATISTICS, unit))
        yield _Pass(last.before(min(gradient, next_)), 3, 2 * turn + 1, Action(end, unit))


def _embedding(plan: Plan, first: _List) -> Iterator[_Pass]:
    """E of all slices, and where there are backwards G and D, by rank 0's list."""
    for microbatch in range(plan.shape.m):
        for slice_ in range(plan.shape.n):
            unit = Unit(microbatch, slice_, 0)
            f = first.index(Op.FORWARD, unit)
            yield _Pass(first.before(f - EMBED_AHEAD), 0, f, Action(Op.EMBED, unit))
            if first.forward_only:
                continue
            d = first.index(Op.BACKWARD, unit)
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
