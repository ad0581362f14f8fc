"""A plan's actions at the times of their lockstep slots: where passes of all ranks belong in a plan with exchange.

Loans bind ranks together in the order of slots. What binds all ranks at one moment must therefore stand between the
same two slots on all of them, or two ranks could wait for each other, one in the loan and one in the pass.
"""

from __future__ import annotations

from slimpipe.schedule.flow import Span
from slimpipe.schedule.plan import Plan
from slimpipe.schedule.slots import Slot, Slots

FORWARD, BACKWARD = 1.0, 2.0
"""Times of slots. Only their order matters: passes stand between slots."""


def slot_spans(plan: Plan, slots: Slots) -> tuple[tuple[Span, ...], ...]:
    """By rank, its F, B, XF and XB, each in its slot's time: slots one after another, in which all ranks begin and end
    together."""
    begins: dict[Slot, float] = {}
    now = 0.0
    for slot in slots:
        begins[slot] = now
        now += FORWARD if slot.kind == "F" else BACKWARD
    spans = []
    for rank, actions in enumerate(plan.ranks):
        row = []
        for action in actions:
            slot = slots.slot_of(rank, action)
            row.append(Span(action, begins[slot], begins[slot] + (FORWARD if slot.kind == "F" else BACKWARD)))
        spans.append(tuple(row))
    return tuple(spans)
