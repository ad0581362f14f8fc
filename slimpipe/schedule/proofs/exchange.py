"""Exchange: every token of every unit's past is attended to exactly once, by its owner or by one helper.

A past that is computed twice or not at all raises no error while it trains: it gives wrong results. Ranges of the KV
buffer are mapped back to tokens of the sequence here, since slices of odd microbatches lie in reverse order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from slimpipe.schedule.action import Op
from slimpipe.schedule.excerpt import refusal
from slimpipe.schedule.exchange import help_action
from slimpipe.schedule.kv_slots import assign_kv_slots
from slimpipe.schedule.lending import Range, without
from slimpipe.schedule.loans import Exchange, Loan
from slimpipe.schedule.plan import Plan, PlanError
from slimpipe.schedule.proofs.units import in_shape
from slimpipe.schedule.slots import Kind, Slot, slots_of

Place = dict[Slot, int]
"""A rank's F, B, XF and XB by slot: where in its list."""


def prove_exchange(plan: Plan, exchange: Exchange) -> None:
    """Raises PlanError at the first loan or helper that is wrong. Relies on `proofs.units` and `proofs.order`."""
    if slots_of(plan) != exchange.slots:
        raise PlanError(f"{plan.name}: the exchange was made for another plan")
    places = [_walk(plan, rank, exchange) for rank in range(plan.shape.p)]
    for loan in exchange.loans:
        _prove_meeting(plan, exchange, loan, places)
    for rank, place in enumerate(places):
        _prove_helpers(plan, exchange, rank, place)
    for rank in range(plan.shape.p):
        _prove_pasts(plan, exchange, rank, places[rank])


def _walk(plan: Plan, rank: int, exchange: Exchange) -> Place:
    """Where a rank's actions stand, by slot: at most one in each, and in the order of time."""
    place: Place = {}
    last = -1
    for index, action in enumerate(plan.ranks[rank]):
        if not (action.op.is_compute or action.op.is_help):
            continue
        if action.op.is_help and not (action.peer is not None and action.peer < plan.shape.p):
            raise refusal(plan, rank, index, f"rank {action.peer} does not exist")
        slot = exchange.slots.slot_of(rank, action)
        if slot.order <= last:
            busy = place.get(slot)
            why = f"action {busy} ({plan.ranks[rank][busy]}) lies there too" if busy is not None else "after later ones"
            raise refusal(plan, rank, index, f"it belongs to the {slot}: {why}")
        last = slot.order
        place[slot] = index
    return place


def _prove_meeting(plan: Plan, exchange: Exchange, loan: Loan, places: list[Place]) -> None:
    """Owner and helper are there in the loan's slot."""
    shape = plan.shape
    for rank in (loan.owner, loan.helper):
        if not 0 <= rank < shape.p:
            raise PlanError(f"{plan.name}: {loan}: rank {rank} does not exist")
    if not in_shape(shape, loan.unit):
        raise PlanError(f"{plan.name}: {loan}: unit {loan.unit} is outside the shape")
    own = exchange.slots.slot(loan.owner, loan.slot.kind, loan.unit)
    index = places[loan.owner][own]
    if loan.owner == loan.helper:
        raise refusal(plan, loan.owner, index, f"{loan}: a rank cannot lend to itself")
    if loan.slot != own:
        raise refusal(plan, loan.owner, index, f"{loan} in the {loan.slot}: it runs in the {own}")
    if loan.slot not in places[loan.helper]:
        help_ = Op.HELP_FORWARD if loan.slot.kind == "F" else Op.HELP_BACKWARD
        raise refusal(
            plan,
            loan.owner,
            index,
            f"{loan}: rank {loan.helper} has no {loan.slot.kind} and no {help_.value} in the {loan.slot}",
        )


def _prove_helpers(plan: Plan, exchange: Exchange, rank: int, place: Place) -> None:
    """A rank's XF and XB stand for the loans of their slot, and for some."""
    for slot, index in place.items():
        action = plan.ranks[rank][index]
        if not action.op.is_help:
            continue
        loans = exchange.help_of(rank, slot)
        if not loans:
            raise refusal(plan, rank, index, f"nobody lends anything to rank {rank} in the {slot}")
        if action != help_action(loans):
            raise refusal(plan, rank, index, f"expected {help_action(loans)}, by the first of its loans")


def _prove_pasts(plan: Plan, exchange: Exchange, rank: int, place: Place) -> None:
    """What a rank lends and what it keeps of each unit's past are that past, exactly once."""
    slots = assign_kv_slots(plan.shape, plan.ranks[rank])
    slice_at: dict[tuple[int, int], dict[int, int]] = {}
    for unit, where in slots.places.items():
        slice_at.setdefault((unit.microbatch, unit.chunk), {})[where.slot] = unit.slice
    for slot, index in place.items():
        action = plan.ranks[rank][index]
        loans = exchange.lent_in(rank, action)
        if loans:
            unit, size = action.unit, exchange.slice_tokens
            past = [(start * size, stop * size) for start, stop in slots.places[unit].past]
            _prove_inside(plan, rank, index, exchange, loans, past)
            _prove_once(plan, rank, index, slot.kind, loans, past, slice_at[unit.microbatch, unit.chunk], size)


def _prove_inside(
    plan: Plan, rank: int, index: int, exchange: Exchange, loans: Iterable[Loan], past: list[Range]
) -> None:
    for loan in loans:
        if loan.start >= loan.stop:
            raise refusal(plan, rank, index, f"{loan}: expected at least one token")
        if loan.start % exchange.granule or loan.stop % exchange.granule:
            raise refusal(plan, rank, index, f"{loan}: expected multiples of the granule of {exchange.granule}")
        if not any(start <= loan.start and loan.stop <= stop for start, stop in past):
            raise refusal(plan, rank, index, f"{loan}: expected a range inside one of its past, {past}")


def _prove_once(
    plan: Plan,
    rank: int,
    index: int,
    kind: Kind,
    loans: Iterable[Loan],
    past: list[Range],
    slice_at: dict[int, int],
    size: int,
) -> None:
    """Kept and lent ranges, as tokens of the sequence, follow each other from the first token to the unit's slice."""
    unit = plan.ranks[rank][index].unit
    ranges: list[tuple[Range, int]] = [(loan.range, loan.helper) for loan in loans]
    ranges += [(kept, rank) for kept in without(past, [loan.range for loan in loans])]
    # Token by token a long past takes its time; most are right, and that is seen at once.
    joined = _joined(positions for positions, _ in ranges)
    if (
        joined is not None
        and joined == _joined(past)
        and sorted(_slices(past, slice_at, size)) == list(range(unit.slice))
    ):
        return
    computed = sorted((tokens, by) for positions, by in ranges for tokens in _tokens(positions, slice_at, size))
    at, before = 0, rank
    for (first, end), by in computed:
        if first < at:
            twice = f"tokens {first} to {min(end, at)} of the past of {kind}{unit} are computed by"
            raise refusal(plan, rank, index, f"{twice} rank {before} and by rank {by}: expected once")
        if first > at:
            break
        at, before = end, by
    if at != unit.slice * size:
        nowhere = f"token {at} of the past of {kind}{unit} is computed by no rank"
        raise refusal(plan, rank, index, f"{nowhere}: expected once")


def _joined(ranges: Iterable[Range]) -> list[Range] | None:
    """The same positions in as few ranges as can be, ascending; None where some are in two of `ranges`."""
    joined: list[Range] = []
    for start, stop in sorted(ranges):
        if joined and start < joined[-1][1]:
            return None
        if joined and start == joined[-1][1]:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return joined


def _slices(past: Iterable[Range], slice_at: dict[int, int], size: int) -> Iterator[int]:
    """Slices of the sequence that lie in these ranges of whole slots."""
    return (slice_at[slot] for start, stop in past for slot in range(start // size, stop // size))


def _tokens(positions: Range, slice_at: dict[int, int], size: int) -> Iterator[Range]:
    """Ranges of the sequence, one in each slice of `size` tokens, that lie at these positions of the KV buffer."""
    start, stop = positions
    while start < stop:
        slot, offset = divmod(start, size)
        end = min(stop, (slot + 1) * size)
        first = slice_at[slot] * size + offset
        yield first, first + end - start
        start = end
