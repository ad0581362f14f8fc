"""The exchange pass: puts helpers into the lists of idle ranks (SlimPipe section 4.2; docs/exchange.md).

A rank with a unit of its own in a slot does what it lends and what it helps with inside that F or B, layer by layer. A
rank with none gets an action for it, XF or XB, between those of its actions that lie in earlier and in later slots.
So all ranks meet in the order of slots, in which no circle of waiting can close.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from slimpipe.schedule.action import Action, Op
from slimpipe.schedule.loans import Exchange, Loan
from slimpipe.schedule.plan import Plan, PlanError
from slimpipe.schedule.slots import Slot


def add_exchange(plan: Plan, exchange: Exchange) -> Plan:
    """The plan with XF and XB; `add_vocabulary` and `lower` come after.

    Raises PlanError for plans that have helpers, passes or transfers already.
    """
    if plan.is_lowered or plan.has_vocabulary or plan.has_help:
        raise PlanError(f"{plan.name}: add_exchange takes forwards and backwards alone, before all other passes")
    help_: defaultdict[int, list[tuple[Slot, Action]]] = defaultdict(list)
    for rank in range(plan.shape.p):
        for slot in exchange.help_slots(rank):
            if exchange.slots.unit(slot, rank) is None:
                help_[rank].append((slot, help_action(exchange.help_of(rank, slot))))
    return Plan(
        plan.name,
        plan.shape,
        tuple(_merge(exchange, rank, actions, help_[rank]) for rank, actions in enumerate(plan.ranks)),
    )


def help_action(loans: Sequence[Loan]) -> Action:
    """The action of an idle rank that computes these loans of one slot. It names the first of them."""
    first = loans[0]
    return Action(Op.HELP_FORWARD if first.slot.kind == "F" else Op.HELP_BACKWARD, first.unit, first.owner)


def exchange_refusal(layers_of_stage: Sequence[Sequence[int]]) -> str | None:
    """None where stages can help each other; else why not. They need equal numbers of layers: a helper computes its
    part of a slot layer by layer beside its owner."""
    counts = [len(layers) for layers in layers_of_stage]
    if len(set(counts)) <= 1:
        return None
    odd = next(stage for stage, count in enumerate(counts) if count != counts[0])
    return (
        f"pipeline.exchange needs stages of equally many layers: stage 0 has {counts[0]} and stage {odd} has "
        f"{counts[odd]}; use a multiple of the {len(counts)} stages (parallel.pp x pipeline.virtual_stages) for "
        "model.layers, equal pipeline.layers_per_stage, or pipeline.exchange = off"
    )


def _merge(
    exchange: Exchange, rank: int, actions: Sequence[Action], help_: Sequence[tuple[Slot, Action]]
) -> tuple[Action, ...]:
    """A rank's list with its help, by slot."""
    merged: list[Action] = []
    at = 0
    for action in actions:
        order = exchange.slots.slot_of(rank, action).order
        while at < len(help_) and help_[at][0].order < order:
            merged.append(help_[at][1])
            at += 1
        merged.append(action)
    return (*merged, *(action for _, action in help_[at:]))
