"""The balance pass: decides ahead of time which rank computes whose attention (SlimPipe 4.2; DESIGN section 4).

In one slot ranks hold slices with different prefixes, so their attention takes different times. For every slot, from the
pasts of the units in it, `balance` makes loans:

- `off`       none.
- `pairwise`  the paper's: smallest past with largest, half the difference in whole slices, where all ranks work.
- `balanced`  the shortest longest rank that moving attention can reach, by granules finer than a slice, with idle ranks
              as helpers. Forward and backward slots are planned by themselves, as they see other idle ranks.

What limits the longest rank is its time, not its attention alone: an idle rank has no dense work in the slot, so it has
room for more attention than a busy one (`fill = "time"`). That counts on ranks that wait for a helper in one layer
catching up in the next, which one owner with one helper cannot; `fill = "attention"` gives an idle rank no more
attention than the busy ones have (docs/exchange.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Literal

from slimpipe.schedule.action import Unit
from slimpipe.schedule.kv_slots import RankSlots, assign_kv_slots
from slimpipe.schedule.lending import cut
from slimpipe.schedule.loans import Exchange, Loan, Mode
from slimpipe.schedule.moves import Move, Pasts, balanced_moves, pairwise_moves
from slimpipe.schedule.plan import Plan, PlanError
from slimpipe.schedule.slots import Kind, Slot, Slots, slots_of
from slimpipe.schedule.work import Work

Fill = Literal["time", "attention"]

Passes = Callable[[Kind, int, int, int], bool]
"""(kind, owner, helper, tokens) -> whether a loan of so many tokens is worth its transfers."""

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
) -> Exchange:
    """The loans of a slimpipe plan. `granule`: tokens, a divisor of `slice_tokens`; whole slices in mode `pairwise`.

    `passes` None: every loan is worth its transfers. Helpers on the owner's node are preferred; by default all ranks
    are on one. Raises PlanError naming the setting to change.
    """
    if mode == "pairwise":
        granule = slice_tokens
    if granule < 1 or slice_tokens % granule:
        raise PlanError(
            f"pipeline.exchange_granule = {granule}: does not divide the {slice_tokens} tokens of a slice "
            f"(data.sequence_length / pipeline.slices); use {default_granule(slice_tokens)}"
        )
    slots = slots_of(plan)
    loans: list[Loan] = []
    if mode != "off":
        moves = plan_moves(slots, mode, work, granule, passes, fill, ranks_per_node)
        loans = list(_place(plan, slots, moves, granule, slice_tokens))
    return Exchange(mode, slots, slice_tokens, granule, tuple(loans))


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
) -> dict[Slot, list[Move]]:
    """Who lends how many granules to whom, by slot, in the order of time; slots without loans are left out."""
    known: dict[tuple[Kind, Pasts], list[Move]] = {}
    moves: dict[Slot, list[Move]] = {}
    near = ranks_per_node or slots.shape.p
    for kind in ("F", "B"):
        load = work.of(kind)
        idle_more = (load.own if fill == "attention" else load.stays) / (load.token * granule)
        for slot, pasts in pasts_of(slots, kind, work.slice_tokens // granule):
            found = known.get((kind, pasts))
            if found is None:
                found = pairwise_moves(pasts) if mode == "pairwise" else balanced_moves(pasts, idle_more, near)
                if passes is not None:
                    found = [m for m in found if passes(kind, m.owner, m.helper, m.amount * granule)]
                known[kind, pasts] = found
            if found:
                moves[slot] = found
    return dict(sorted(moves.items(), key=lambda item: item[0].order))


def pasts_of(slots: Slots, kind: Kind, per_slice: int = 1) -> Iterator[tuple[Slot, Pasts]]:
    """Every slot of a kind with the pasts of the units in it, by rank, at so many granules a slice."""
    beyond = (None,) * (slots.shape.p - 1)
    pasts: Pasts = (*beyond, *(unit.slice * per_slice for unit in slots.units(kind)), *beyond)
    # In forward slots a rank is one unit behind the rank before it, in backward slots one behind the rank after it.
    step = -1 if kind == "F" else 1
    for slot in slots.of_kind(kind):
        at = slot.tick - slots.first(kind)
        yield slot, pasts[at : at + slots.shape.p][::step]


def _place(
    plan: Plan, slots: Slots, moves: dict[Slot, list[Move]], granule: int, slice_tokens: int
) -> Iterator[Loan]:
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
