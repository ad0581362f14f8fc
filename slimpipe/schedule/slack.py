"""When forwards and backwards can run within a plan's shortest step: from their earliest times to their latest.

A simulated step starts everything as early as it can. The latest times are those from which the step takes no longer
either; on the way in between ranks have time to spare. p = 2, n = 4, m = 2, a backward taking two forwards:

    earliest  FFFFFF.B-FB-FB-.B-.B-B-B-B-      latest  FFFF..F.FB-FB-FB-B-B-B-B-B-
              .FFFFB-FB-FB-FB-FB-B-B-B-..              .FFFFB-FB-FB-FB-FB-B-B-B-..
"""

from __future__ import annotations

from slimpipe.schedule.costs import Costs
from slimpipe.schedule.flow import Span
from slimpipe.schedule.plan import Plan, PlanError
from slimpipe.schedule.simulate import simulate
from slimpipe.schedule.timeline import Timeline
from slimpipe.schedule.transfers import Tensor, input_of, output_of

Spans = tuple[tuple[Span, ...], ...]
"""By rank, its actions with their times, in order."""


def earliest(plan: Plan, costs: Costs) -> Timeline:
    """The forwards and backwards of a plan at their earliest times; transfers are free. Raises PlanError where one of
    them costs nothing."""
    timeline = simulate(plan, costs)
    for rank, spans in enumerate(timeline.spans):
        for span in spans:
            if span.end <= span.start:
                raise PlanError(f"{plan.name}: rank {rank}, {span.action}: its cost is 0, but must be above 0")
    return timeline


def halfway(early: Spans, late: Spans) -> Spans:
    """Half way from the earliest to the latest: every action can be as much late as early, and the step still be short.

    That is possible for all at once: what binds two actions is a difference of their times, in both extremes met.
    """
    return tuple(
        tuple(
            Span(first.action, (first.start + last.start) / 2, (first.end + last.end) / 2)
            for first, last in zip(*rows, strict=True)
        )
        for rows in zip(early, late, strict=True)
    )


def latest(plan: Plan, earliest: Timeline) -> Spans:
    """The forwards and backwards at their latest times within the makespan of what `earliest` gave.

    Exact in itself: no action ends after the start of what follows on its rank, or of what consumes its output.
    """
    free_until = [earliest.makespan] * plan.shape.p
    needed_at: dict[Tensor, float] = {}
    late: list[list[Span]] = [[] for _ in plan.ranks]
    spans = [(span.start, rank, span) for rank, spans in enumerate(earliest.spans) for span in spans]
    # Costs being above 0, an action starts before whatever depends on it: backwards in time, dependents come first.
    for _, rank, (action, start, end) in sorted(spans, reverse=True):
        made, used = output_of(plan.shape, rank, action), input_of(plan.shape, rank, action)
        latest_end = free_until[rank]
        if made is not None:
            latest_end = min(latest_end, needed_at[made])
        latest_start = latest_end - (end - start)
        if used is not None:
            needed_at[used] = latest_start
        free_until[rank] = latest_start
        late[rank].append(Span(action, latest_start, latest_end))
    return tuple(tuple(reversed(spans)) for spans in late)
