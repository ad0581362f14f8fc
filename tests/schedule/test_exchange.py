"""Exchange as a plan: loans are sound over all shapes, and broken ones are refused."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slimpipe.schedule import (
    MODES,
    Action,
    Exchange,
    Loan,
    Mode,
    Op,
    Plan,
    PlanError,
    Shape,
    Slot,
    Unit,
    add_exchange,
    add_vocabulary,
    assign_kv_slots,
    balance,
    build,
    check,
    default_granule,
    exchange_refusal,
    from_csv,
    grid,
    lower,
    place_layers,
    sliced_work,
    slots_of,
    to_csv,
)
from slimpipe.schedule.balance import plan_moves
from slimpipe.schedule.exchange import help_action
from slimpipe.schedule.moves import Fill
from slimpipe.schedule.proofs import exchange as proofs
from slimpipe.schedule.proofs.progress import prove_progress
from tests.schedule.shapes import cases, slimpipe_shapes
from tests.schedule.test_check import edited

SLICE, GRANULE = 8, 2


def exchanged(
    shape: Shape, mode: Mode = "balanced", share: float = 0.8, fill: Fill = "time", again: bool = False
) -> tuple[Plan, Exchange]:
    plan = build("slimpipe", shape)
    work = sliced_work(shape.n, share, SLICE).recomputing(0.5 * again, again)
    exchange = balance(plan, mode, work, GRANULE, SLICE, fill=fill)
    return add_exchange(plan, exchange), exchange


# ---- sound ones ----


def attended(plan: Plan, exchange: Exchange, rank: int, kind: str) -> Iterator[tuple[Unit, Counter[int]]]:
    """Each unit of a rank with how often each token before its slice is computed, by following KV slots by hand."""
    places = assign_kv_slots(plan.shape, plan.ranks[rank]).places
    op = Op.FORWARD if kind == "F" else Op.BACKWARD
    for action in plan.ranks[rank]:
        if action.op is not op:
            continue
        unit = action.unit
        tokens_at = {
            places[Unit(unit.microbatch, slice_, unit.chunk)].slot * SLICE + offset: slice_ * SLICE + offset
            for slice_ in range(unit.slice)
            for offset in range(SLICE)
        }
        loans = exchange.lent_in(rank, action)
        lent = Counter(tokens_at[position] for loan in loans for position in range(loan.start, loan.stop))
        kept = {position for position in tokens_at if not any(a <= position < b for a, b in (x.range for x in loans))}
        yield unit, lent + Counter(tokens_at[position] for position in kept)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_every_shape_is_sound(p: int, mode: Mode) -> None:
    """With vocabulary passes and transfers on top; every token of every past computed once, counted independently."""
    loans = odd = 0
    slices = sorted({1, 2, 3, p - 1, p, 2 * p - 1, 2 * p, 2 * p + 1, 4 * p} - {0})
    for _, shape in cases([p], [1, 2], slices, [1, 2, 3], ["slimpipe"]):
        plan, exchange = exchanged(shape, mode)
        peaks = check(plan, exchange)
        full = lower(add_vocabulary(plan, slots=exchange.slots) if p > 1 else plan)
        assert check(full, exchange).kv_slots == peaks.kv_slots
        assert [a for a in full.ranks[-1] if a.op.is_compute or a.op.is_help] == list(plan.ranks[-1])
        loans += len(exchange.loans)
        odd += sum(loan.unit.microbatch % 2 for loan in exchange.loans)
        for kind in ("F", "B"):
            for rank in range(p):
                for unit, computed in attended(plan, exchange, rank, kind):
                    assert computed == Counter(range(unit.slice * SLICE)), (shape, rank, kind, unit)
    # A test without loans proves nothing. Two ranks with whole slices lend almost nothing.
    least = {"off": 0, "pairwise": 8 if p == 2 else 300, "balanced": 700}[mode]
    assert loans >= (least if p > 1 else 0)
    assert odd >= (loans // 5 if p > 1 else 0)
    assert loans == 0 or (p > 1 and mode != "off")


@settings(max_examples=60)
@given(
    slimpipe_shapes(p=6, v=3, n=14, m=4),
    st.sampled_from(["pairwise", "balanced"]),
    st.floats(0.05, 1.0),
    st.sampled_from(["time", "attention"]),
)
def test_any_shape_share_and_fill(shape: Shape, mode: Mode, share: float, fill: Fill) -> None:
    plan, exchange = exchanged(shape, mode, share, fill)
    check(plan, exchange)
    for slot, loans in exchange.by_slot.items():
        # Cut in two where the past is two ranges and neither has room, which none of these shapes brings about.
        assert len(loans) <= shape.p - 1
        assert not {loan.owner for loan in loans} & {loan.helper for loan in loans}
        for loan in loans:
            assert loan in exchange.help_of(loan.helper, slot)
            lent = exchange.forward_of if slot.kind == "F" else exchange.backward_of
            assert loan in lent(loan.owner, loan.unit)
    assert list(exchange.loans) == [loan for loans in exchange.by_slot.values() for loan in loans]


def test_helpers_stand_in_their_slots() -> None:
    """p = 3, n = 6, m = 1: idle ranks help in the ramps, B slots with ranks of their own."""
    plan, exchange = exchanged(Shape(p=3, n=6, m=1))
    assert [str(action) for action in plan.ranks[0] if action.op.is_help] == [
        "XF0.5@0<1",
        "XF0.5@0<2",
        "XB0.5@0<2",
        "XB0.5@0<1",
    ]
    for rank, actions in enumerate(plan.ranks):
        for action in actions:
            helped = exchange.helped_in(rank, action)
            if action.op.is_help:
                assert action == help_action(helped)
                assert exchange.lent_in(rank, action) == ()
                assert exchange.slots.unit(exchange.slots.slot_of(rank, action), rank) is None
    lines = grid(plan, exchange=exchange).splitlines()
    assert lines[1].split()[2:] == [
        *(f"F0.{i}" for i in range(6)),
        *("XF0.5", "XF0.5", "XB0.5", "XB0.5"),
        *(f"B0.{i}" for i in range(5, -1, -1)),
    ]
    assert from_csv(to_csv(lower(plan))) == lower(plan)


def test_groups_are_what_loans_bind() -> None:
    _, exchange = exchanged(Shape(p=4, n=8, m=2))
    for slot, loans in exchange.by_slot.items():
        for loan in loans:
            group = exchange.group_of(loan.owner, slot)
            assert loan.helper in group and exchange.group_of(loan.helper, slot) == group
        bound = {rank for loan in loans for rank in (loan.owner, loan.helper)}
        alone = set(range(4)) - bound
        assert all(exchange.group_of(rank, slot) == {rank} for rank in alone)
        assert sum(1 / len(exchange.group_of(rank, slot)) for rank in bound) <= len(loans)


def test_nothing_to_exchange() -> None:
    for shape in (Shape(p=1, n=8, m=2), Shape(p=4, n=1, m=4), Shape(p=1, n=1, m=1)):
        for mode in MODES:
            plan, exchange = exchanged(shape, mode)
            assert exchange.loans == () and exchange.by_slot == {}
            assert plan == build("slimpipe", shape)
            check(plan, exchange)


def test_forward_and_backward_loans_mostly_coincide() -> None:
    """What `pipeline.exchange_keep: kv` rests on: the helper of a unit's forward has the same range in its backward."""
    _, exchange = exchanged(Shape(p=8, n=32, m=4))
    by_kind = {kind: {loan[1:] for loan in exchange.loans if loan.slot.kind == kind} for kind in ("F", "B")}
    assert len(by_kind["F"] & by_kind["B"]) > 0.75 * len(by_kind["F"])


def test_64_ranks_are_planned_in_about_a_second() -> None:
    """p = 64, n = 256, v = 4, m = 8, 1.1 million units; 0.2 s where this was written."""
    plan = build("slimpipe", Shape(p=64, v=4, n=256, m=8))
    begin = time.process_time()
    moves = plan_moves(slots_of(plan), "balanced", sliced_work(256, 0.8, 4096), 1024)
    assert time.process_time() - begin < 2
    assert sum(map(len, moves.values())) > 500_000


# ---- refusals ----


@pytest.mark.parametrize(
    ("slice_tokens", "granule"),
    [(4096, 1024), (8192, 2048), (1536, 384), (512, 128), (640, 640), (256, 128), (96, 24), (6, 2), (7, 7), (1, 1)],
)
def test_default_granule(slice_tokens: int, granule: int) -> None:
    assert default_granule(slice_tokens) == granule


def test_granule_must_divide_a_slice() -> None:
    plan = build("slimpipe", Shape(p=2, n=4, m=1))
    with pytest.raises(PlanError, match=r"pipeline.exchange_granule = 3: does not divide the 8 tokens.*use 2"):
        balance(plan, "balanced", sliced_work(4, 0.8, 8), 3, 8)


def test_only_slimpipe_exchanges() -> None:
    plan = build("interleaved", Shape(p=2, v=2, m=4))
    with pytest.raises(PlanError, match="needs pipeline.schedule = slimpipe.*found interleaved"):
        balance(plan, "balanced", sliced_work(4, 0.8, 8), 2, 8)


def test_stages_need_equal_layers() -> None:
    assert exchange_refusal(place_layers(8, 4)) is None
    reason = exchange_refusal(place_layers(9, 4))
    assert reason is not None
    assert reason.startswith("pipeline.exchange needs stages of equally many layers: stage 0 has 3 and stage 1 has 2")


def test_passes_come_in_one_order() -> None:
    plan, exchange = exchanged(Shape(p=2, n=4, m=1))
    for later in (plan, lower(build("slimpipe", plan.shape)), add_vocabulary(build("slimpipe", plan.shape))):
        with pytest.raises(PlanError, match="before all other passes"):
            add_exchange(later, exchange)
    with pytest.raises(PlanError, match="pass the exchange"):
        check(plan)


# ---- broken ones ----

SHAPE = Shape(p=3, v=2, n=6, m=2)


@pytest.fixture(scope="module")
def sound() -> tuple[Plan, Exchange]:
    plan, exchange = exchanged(SHAPE)
    check(plan, exchange)
    return plan, exchange


def with_loan(exchange: Exchange, change: Callable[[Loan], Loan], which: Callable[[Loan], bool]) -> Exchange:
    at = next(index for index, loan in enumerate(exchange.loans) if which(loan))
    loans = [*exchange.loans[:at], change(exchange.loans[at]), *exchange.loans[at + 1 :]]
    return replace(exchange, place=lambda: loans)


def any_loan(loan: Loan) -> bool:
    return True


def to_a_busy_rank(loan: Loan) -> bool:
    return slots_of(build("slimpipe", SHAPE)).unit(loan.slot, loan.helper) is not None


LOAN_MUTATIONS: dict[str, tuple[Callable[[Loan], bool], Callable[[Loan], Loan], str]] = {
    "own block": (
        any_loan,
        lambda x: x._replace(start=8 * x.unit.slice, stop=8 * x.unit.slice + 2),
        "inside one of its",
    ),
    "beyond the past": (any_loan, lambda x: x._replace(stop=x.stop + 800), "inside one of its past"),
    "off the granule": (any_loan, lambda x: x._replace(stop=x.stop - 1), "multiples of the granule of 2"),
    "empty": (any_loan, lambda x: x._replace(stop=x.start), "at least one token"),
    "backwards": (any_loan, lambda x: x._replace(start=x.stop, stop=x.start), "at least one token"),
    "later slot": (any_loan, lambda x: x._replace(slot=Slot(x.slot.tick + 1, x.slot.kind)), "it runs in the"),
    "slot of the other kind": (
        lambda x: x.slot.kind == "B" and x.unit.slice < 5,
        lambda x: x._replace(slot=Slot(x.slot.tick, "F")),
        "it runs in the F slot",
    ),
    "another unit": (any_loan, lambda x: x._replace(unit=x.unit._replace(chunk=1 - x.unit.chunk)), "it runs in the"),
    "no such unit": (any_loan, lambda x: x._replace(unit=x.unit._replace(slice=6)), "outside the shape"),
    "to itself": (to_a_busy_rank, lambda x: x._replace(helper=x.owner), "cannot lend to itself"),
    "no such helper": (any_loan, lambda x: x._replace(helper=3), "rank 3 does not exist"),
    "no such owner": (any_loan, lambda x: x._replace(owner=-1), "rank -1 does not exist"),
}


@pytest.mark.parametrize("what", LOAN_MUTATIONS)
def test_broken_loan_is_refused(sound: tuple[Plan, Exchange], what: str) -> None:
    which, change, why = LOAN_MUTATIONS[what]
    plan, exchange = sound
    with pytest.raises(PlanError, match=why):
        check(plan, with_loan(exchange, change, which))


def test_overlapping_loans_are_refused(sound: tuple[Plan, Exchange]) -> None:
    """The same token to two helpers, to one twice; the message tells the tokens, in the sequence's own order."""
    plan, exchange = sound
    owned = Counter((loan.owner, loan.slot) for loan in exchange.loans)
    twice = next(key for key, count in owned.items() if count == 2)
    first, second = (loan for loan in exchange.loans if (loan.owner, loan.slot) == twice)
    wider = with_loan(exchange, lambda x: x._replace(stop=first.stop, start=first.stop - 2), lambda x: x == second)
    with pytest.raises(PlanError, match=rf"are computed by rank {first.helper} and by rank {second.helper}: exp"):
        check(plan, wider)
    doubled = replace(exchange, place=lambda: [*exchange.loans, first])
    with pytest.raises(PlanError, match=r"tokens \d+ to \d+ of the past of .* expected once"):
        check(plan, doubled)


def test_tokens_of_odd_microbatches_are_named_in_sequence_order() -> None:
    """Microbatch 1 grows from the right end: the highest positions of its past are its first tokens."""
    plan, exchange = exchanged(Shape(p=2, n=8, m=2))
    loan = next(x for x in exchange.loans if x.unit.microbatch == 1 and x.unit.slice > 2 and x.slot.kind == "F")
    place = assign_kv_slots(plan.shape, plan.ranks[loan.owner]).places[loan.unit]
    assert loan.stop == place.past[0][1] * SLICE, "lent from the end that is far from the unit's own slot"
    last = Loan(loan.slot, loan.owner, loan.unit, loan.helper, loan.stop - 2, loan.stop)
    with pytest.raises(PlanError, match=r"tokens 6 to 8 of the past of F1\.\d@0"):
        check(plan, replace(exchange, place=lambda: [*exchange.loans, last]))


def test_tokens_that_nobody_computes_are_found(sound: tuple[Plan, Exchange], monkeypatch: pytest.MonkeyPatch) -> None:
    """Were owners to keep less than what they have not lent."""
    plan, exchange = sound
    monkeypatch.setattr(proofs, "without", lambda past, lent: [])
    with pytest.raises(PlanError, match=r"token \d+ of the past of F0.\d@\d is computed by no rank: expected once"):
        check(plan, exchange)


def helper_of(plan: Plan) -> tuple[int, str]:
    return next((rank, str(a)) for rank, actions in enumerate(plan.ranks) for a in actions if a.op is Op.HELP_FORWARD)


def test_broken_helpers_are_refused(sound: tuple[Plan, Exchange]) -> None:
    plan, exchange = sound
    rank, token = helper_of(plan)
    help_ = Action.parse(token)
    slot = exchange.slots.slot_of(rank, help_)
    missing = edited(plan, rank, lambda tokens: tokens.remove(token))
    with pytest.raises(PlanError, match=rf"rank {rank} has no F and no XF in the {slot}"):
        check(missing, exchange)
    with pytest.raises(PlanError, match="lies there too"):
        check(edited(plan, rank, lambda tokens: tokens.insert(tokens.index(token), token)), exchange)

    def late(tokens: list[str]) -> None:
        tokens.append(tokens.pop(tokens.index(token)))

    with pytest.raises(PlanError, match="after later ones"):
        check(edited(plan, rank, late), exchange)
    nobody = f"XF{help_.unit}<9"
    with pytest.raises(PlanError, match="rank 9 does not exist"):
        check(edited(plan, rank, lambda tokens: tokens.__setitem__(tokens.index(token), nobody)), exchange)


def test_helper_busy_with_a_unit_of_its_own_is_refused(sound: tuple[Plan, Exchange]) -> None:
    """In the slot of its own forward, and in one of a backward."""
    plan, exchange = sound
    for op, kind in ((Op.HELP_FORWARD, "F"), (Op.HELP_BACKWARD, "B")):
        loan = next(x for x in exchange.loans if x.slot.kind == kind and to_a_busy_rank(x))
        own = Action(Op.FORWARD if kind == "F" else Op.BACKWARD, exchange.slots.unit(loan.slot, loan.helper))  # type: ignore[arg-type]
        token = str(Action(op, loan.unit, loan.owner))
        busy = edited(plan, loan.helper, lambda tokens: tokens.insert(tokens.index(str(own)) + 1, token))  # noqa: B023
        with pytest.raises(PlanError, match=r"it belongs to the [FB] slot of tick \d+: action \d+ .* lies there too"):
            check(busy, exchange)


def test_helper_for_nothing_is_refused(sound: tuple[Plan, Exchange]) -> None:
    """An XF in a slot in which the rank is idle and nobody lends to it, and one that does not name its first loan."""
    plan, exchange = sound
    rank, token = helper_of(plan)
    slot = exchange.slots.slot_of(rank, Action.parse(token))
    fewer = replace(exchange, place=lambda: [x for x in exchange.loans if (x.helper, x.slot) != (rank, slot)])
    with pytest.raises(PlanError, match=f"nobody lends anything to rank {rank} in the {slot}"):
        check(plan, fewer)
    other = next(r for r in range(3) if exchange.slots.unit(slot, r) and r != Action.parse(token).peer)
    wrong = f"XF{exchange.slots.unit(slot, other)}<{other}"
    with pytest.raises(PlanError, match=f"expected {token}, by the first of its loans"):
        check(edited(plan, rank, lambda tokens: tokens.__setitem__(tokens.index(token), wrong)), exchange)


def test_exchange_of_another_plan_is_refused(sound: tuple[Plan, Exchange]) -> None:
    _, other = exchanged(Shape(p=3, v=2, n=6, m=1))
    with pytest.raises(PlanError, match="was made for another plan"):
        check(sound[0], other)


def test_missing_partner_is_a_deadlock(sound: tuple[Plan, Exchange]) -> None:
    """The proof of progress by itself: a rank waits for its group in vain."""
    plan, exchange = sound
    rank, token = helper_of(plan)
    with pytest.raises(PlanError, match=rf"deadlock: .*waits for rank {rank} in the F slot of tick"):
        prove_progress(edited(plan, rank, lambda tokens: tokens.remove(token)), exchange)
