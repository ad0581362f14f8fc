"""When each forward and backward must start at the latest for a step to take no longer.

A simulated step starts everything as early as it can, and there the first ranks run ahead: in the 1F1B phase of
slimpipe rank 0 is half a tick early, in its backward while the last rank is in its forward. In the latest times the
ranks are in phase: all in their forward slot or all in their backward slot (orders.slimpipe). So what binds all ranks
together costs least at places taken from these times: ranks with slack wait there, and those without do not.
"""

from __future__ import annotations

from slimpipe.schedule.costs import Costs
from slimpipe.schedule.flow import Span
from slimpipe.schedule.plan import Plan, PlanError
from slimpipe.schedule.simulate import simulate
from slimpipe.schedule.transfers import Tensor, input_of, output_of


def latest_spans(plan: Plan, costs: Costs) -> tuple[tuple[Span, ...], ...]:
    """By rank, the forwards and backwards of a plan at their latest times within the plan's shortest makespan.

    Transfers are free. Starts and ends are exact to each other: an action's end is never after the start of what
    follows it on its rank or consumes its output.
    """
    timeline = simulate(plan, costs)
    end_of_rank = [timeline.makespan] * plan.shape.p
    needed_at: dict[Tensor, float] = {}
    late: list[list[Span]] = [[] for _ in plan.ranks]
    spans = [(span.start, rank, span) for rank, spans in enumerate(timeline.spans) for span in spans]
    for start, rank, span in spans:
        if span.end <= start:
            raise PlanError(f"{plan.name}: rank {rank}, {span.action}: its cost is 0, but must be above 0")
    # Costs being above 0, an action starts before whatever depends on it: backwards in time, dependents come first.
    for _, rank, (action, start, end) in sorted(spans, reverse=True):
        made, used = output_of(plan.shape, rank, action), input_of(plan.shape, rank, action)
        latest_end = end_of_rank[rank]
        if made is not None:
            latest_end = min(latest_end, needed_at[made])
        latest_start = latest_end - (end - start)
        if used is not None:
            needed_at[used] = latest_start
        end_of_rank[rank] = latest_start
        late[rank].append(Span(action, latest_start, latest_end))
    return tuple(tuple(reversed(spans)) for spans in late)
