"""The balance pass: decides ahead of time which rank computes whose attention (SlimPipe 4.2; docs/exchange.md).

In one slot ranks hold slices with different prefixes, so their attention takes different times. For every slot, from
the pasts of the units in it, `balance` makes loans:

- `off`       none.
- `pairwise`  the paper's: smallest past with largest, half the difference in whole slices, where all ranks work.
- `balanced`  the shortest longest rank that moving attention can reach, by granules finer than a slice, with idle ranks
              as helpers. Forward and backward slots are planned by themselves, as they see other idle ranks.

What limits the longest rank is its time, not its attention alone: an idle rank has no dense work in the slot, so it has
room for more attention than a busy one (`fill = "time"`). Layer by layer, though, the owner waits for its helper before
it goes on with its dense work, and the helper has nothing to do meanwhile: `fill = "attention"` gives an idle rank no
more attention than the busy ones have, and where transfers are counted that is the faster (docs/exchange.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

from slimpipe.schedule.cheapest import Cheapest, worth
from slimpipe.schedule.kv_slots import RankSlots, assign_kv_slots
from slimpipe.schedule.lending import cut
from slimpipe.schedule.loans import Exchange, Loan, Mode
from slimpipe.schedule.moves import Fill, Move, Passes, balanced_moves, idle_more, pairwise_moves
from slimpipe.schedule.plan import Plan, PlanError
from slimpipe.schedule.slot_times import SlotTimes
from slimpipe.schedule.slots import KINDS, Kind, Pasts, Slot, Slots, slots_of
from slimpipe.schedule.work import Work

ATTENTION_BLOCK: Final = 128
"""Tokens that an attention kernel takes at once: ranges that are no multiple of it waste part of a block."""


def balance(
    plan: Plan,
    mode: Mode,
    work: Work,
    granule: int,
    slice_tokens: int,
    passes: Passes | None = None,
    *,
    fill: Fill = "time",
    ranks_per_node: int | None = None,
    times: SlotTimes | None = None,
) -> Exchange:
    """The loans of a slimpipe plan. `granule`: tokens, a divisor of `slice_tokens`; whole slices in mode `pairwise`.

    `passes` None: every loan is worth its transfers. Helpers on the owner's node are preferred; by default all ranks
    are on one. `times`, in mode `balanced`: what slots take with their transfers; then each slot gets the loans that
    make it shortest (`schedule.cheapest`). Raises PlanError naming the setting to change.
    """
    if mode == "pairwise":
        granule = slice_tokens
    if granule < 1 or slice_tokens % granule:
        raise PlanError(
            f"pipeline.exchange_granule = {granule}: does not divide the {slice_tokens} tokens of a slice "
            f"(data.sequence_length / pipeline.slices); use {default_granule(slice_tokens)}"
        )
    slots, again = slots_of(plan), work.again is not None
    if mode == "off":
        return Exchange(mode, slots, slice_tokens, granule, again=again)
    moves = plan_moves(slots, mode, work, granule, passes, fill, ranks_per_node, times)
    place = partial(_place, plan, slots, moves, granule, slice_tokens)
    return Exchange(mode, slots, slice_tokens, granule, place, again)


def default_granule(slice_tokens: int) -> int:
    """A quarter of a slice, or the next larger part of it that attention kernels take whole; else the slice itself.

    Slices too short to be divided into kernel blocks are quartered where they can be.
    """
    quarter = -(-slice_tokens // 4)
    block = ATTENTION_BLOCK if slice_tokens >= 2 * ATTENTION_BLOCK else 1
    return next(size for size in range(quarter, slice_tokens + 1) if slice_tokens % size == 0 == size % block)


def plan_moves(
    slots: Slots,
    mode: Mode,
    work: Work,
    granule: int,
    passes: Passes | None = None,
    fill: Fill = "time",
    ranks_per_node: int | None = None,
    times: SlotTimes | None = None,
) -> dict[Slot, list[Move]]:
    """Who lends how many granules to whom, by slot, in the order of time; slots without loans are left out."""
    near = ranks_per_node or slots.shape.p
    cheapest = Cheapest(work, granule, times, passes, fill, near) if times is not None and mode == "balanced" else None

    def plan(kind: Kind, pasts: Pasts) -> list[Move]:
        if cheapest is not None:
            return cheapest.moves(kind, pasts)
        if mode == "pairwise":
            moves = pairwise_moves(pasts)
        else:
            moves = balanced_moves(pasts, idle_more(work, kind, fill, granule), near)
        return worth(moves, kind, granule, passes)

    known: dict[tuple[Kind, Pasts], list[Move]] = {}
    planned: dict[Slot, list[Move]] = {}
    for kind in KINDS:
        for slot, pasts in slots.pasts(kind, work.slice_tokens // granule):
            found = known.get((kind, pasts))
            if found is None:
                found = known[kind, pasts] = plan(kind, pasts)
            if found:
                planned[slot] = found
    return dict(sorted(planned.items(), key=lambda item: item[0].order))


def _place(plan: Plan, slots: Slots, moves: dict[Slot, list[Move]], granule: int, slice_tokens: int) -> Iterator[Loan]:
    """Loans of the moves: each gets a range of its owner's past."""
    ranks: list[RankSlots] = [assign_kv_slots(plan.shape, actions) for actions in plan.ranks]
    for slot, found in moves.items():
        by_owner: dict[int, list[Move]] = {}
        for move in found:
            by_owner.setdefault(move.owner, []).append(move)
        for owner, lent in by_owner.items():
            unit = slots.unit(slot, owner)
            assert unit is not None
            place = ranks[owner].places[unit]
            past = [(start * slice_tokens, stop * slice_tokens) for start, stop in place.past]
            ranges = cut(past, place.slot * slice_tokens, [move.amount * granule for move in lent])
            for move, pieces in zip(lent, ranges, strict=True):
                for start, stop in pieces:
                    yield Loan(slot, owner, unit, move.helper, start, stop)
