"""The plan of an evaluation: sound with every pass, in n KV slots a chunk, and as short as its formula says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest

from slimpipe.schedule import (
    Exchange,
    Op,
    Plan,
    PlanError,
    Shape,
    Unit,
    add_exchange,
    add_vocabulary,
    assign_kv_slots,
    balance,
    build,
    check,
    draw_svg,
    equal_costs,
    forward_only,
    from_csv,
    grid,
    least_send_window,
    links,
    lower,
    output_layer_costs,
    replay_in_order,
    simulate,
    sliced_work,
    to_csv,
)
from slimpipe.schedule.proofs.slots import prove_rank_slots
from tests.schedule.shapes import Case, cases
from tests.schedule.test_check import Tokens, after, drop, edited, replaced, swap

CASES = [
    *cases([1, 2, 3, 4], [1, 2, 3], [1, 2, 5, 8], [1, 3]),
    *cases([8], [2], [12], [2], ["slimpipe"]),
]
TOKENS = 64


def made(case: Case, vocabulary: bool = False, exchange: bool = False) -> tuple[Plan, Exchange | None]:
    """An evaluation's plan with all that is asked for, as a run makes it."""
    name, shape = case
    plan, loans, work = forward_only(build(name, shape)), None, sliced_work(shape.n, 0.5, TOKENS)
    if exchange:
        loans = balance(plan, "balanced", work, TOKENS // 4, TOKENS, fill="attention")
        plan = add_exchange(plan, loans)
    if vocabulary:
        plan = add_vocabulary(plan, None if loans else work.costs())
    return lower(plan, 0 if vocabulary or exchange else 2), loans


def most_kept(name: str, shape: Shape) -> int:
    """Units whose keys a rank keeps at most. When a group of G slices ends a microbatch in chunk 0, that chunk holds
    all n of them and the others what earlier groups have left there."""
    if name != "slimpipe":
        return 1
    group = next(size for size in range(min(shape.p, shape.n), shape.n + 1) if shape.n % size == 0)
    return shape.n + (shape.v - 1) * (shape.n - group)


@pytest.mark.parametrize(("vocabulary", "exchange"), [(False, False), (True, False), (False, True), (True, True)])
def test_sound_in_every_order_with_every_pass(vocabulary: bool, exchange: bool) -> None:
    loans = 0
    for name, shape in CASES:
        if (vocabulary or exchange) and (shape.p == 1 or name != "slimpipe" or shape.v > 2):
            continue
        plan, lent = made((name, shape), vocabulary, exchange)
        peaks = check(plan, lent, forward_only=True)
        assert peaks.units == (most_kept(name, shape),) * shape.p, (name, shape)
        assert peaks.kv_slots == ((shape.n,) * shape.v,) * shape.p, (name, shape)
        assert peaks.logits == (int(vocabulary),) * shape.p
        report = replay_in_order(plan, exchange=lent, send_window=max(2, least_send_window(plan, exchange=lent)))
        assert {link.kind for link in report.transfers} <= {"F"}
        assert from_csv(to_csv(plan)) == plan
        if lent is not None:
            loans += len(lent.loans)
            assert {loan.slot.kind for loan in lent.loans} <= {"F"}
    assert loans > 500 or not exchange


def test_an_evaluation_needs_nothing_that_training_has_not() -> None:
    """Neither links nor KV slots: it shares the training's."""
    for name, shape in CASES:
        trained = build(name, shape)
        plan = forward_only(trained)
        assert set(links(plan)) <= set(links(trained))
        for rank in range(shape.p):
            ours, theirs = (assign_kv_slots(shape, p.ranks[rank]).capacity for p in (plan, trained))
            assert all(a <= b for a, b in zip(ours, theirs, strict=True)), (name, shape, rank)


def test_an_evaluation_may_need_more_sends_under_way_than_training() -> None:
    """Late slices are heavy, so early ones pile up in front of them: a pass between holds all ranks."""
    costs = sliced_work(16, 0.8, TOKENS).costs()
    plan = build("slimpipe", Shape(p=4, n=16, m=2))
    trained, evaluated = (lower(add_vocabulary(p, costs), 0) for p in (plan, forward_only(plan)))
    assert least_send_window(trained) <= 2
    assert least_send_window(evaluated) == 3
    with pytest.raises(PlanError, match="send_window = 2 may be too small"):
        replay_in_order(evaluated, send_window=2)


def test_simulated_bubble_and_peak_are_the_formulas() -> None:
    """Bubble (p-1)/(m n v + p-1), as in training; a tick of one forward each."""
    for name, shape in CASES:
        timeline = simulate(made((name, shape))[0], equal_costs())
        expected = Fraction(shape.p - 1, shape.units + shape.p - 1)
        assert timeline.bubble_fraction == pytest.approx(float(expected)), (name, shape)
        assert timeline.makespan == shape.units + shape.p - 1
        assert timeline.peak_units == (most_kept(name, shape),) * shape.p


def test_passes_cost_little_beside_an_even_split_of_the_output_layer() -> None:
    """Equal slices, the output layer a quarter of a forward: a pass's way round is hidden but at the end."""
    shape = Shape(p=4, n=8, m=4)
    costs = replace(equal_costs(), vocabulary=output_layer_costs(0.25, shape.p, forward_only=True))
    passes = simulate(lower(add_vocabulary(forward_only(build("slimpipe", shape))), 0), costs).makespan
    whole = simulate(made(("slimpipe", shape))[0], costs).makespan
    split = (1 + 0.25 / shape.p) * shape.units + shape.p - 1
    assert split <= passes <= 1.02 * split
    assert whole == pytest.approx(1.25 * shape.units + shape.p - 1)


def test_by_hand() -> None:
    plan = forward_only(build("slimpipe", Shape(p=2, n=2, m=2)))
    assert grid(plan) == (
        "tick       0     1     2     3     4\n"
        "rank 0  F0.0  F0.1  F1.0  F1.1     .\n"
        "rank 1     .  F0.0  F0.1  F1.0  F1.1\n"
    )
    plan = add_vocabulary(plan)
    order = " ".join(map(str, plan.ranks[1]))
    assert order == (
        "E0.0@0 E0.1@0 E1.0@0 E1.1@0 F0.0@0 H0.0@0 F0.1@0 H0.1@0 F1.0@0 H1.0@0 S0.0@0 F1.1@0 H1.1@0 L0.0@0 "
        "S0.1@0 L0.1@0 S1.0@0 L1.0@0 S1.1@0 L1.1@0"
    )
    assert "backward" not in draw_svg(simulate(plan, equal_costs())).split("Ranks")[1]


def test_a_microbatchs_slots_are_free_behind_its_last_slice() -> None:
    """Two microbatches in the slots of one, the second from the other end."""
    slots = assign_kv_slots(Shape(p=1, n=3, m=2), forward_only(build("slimpipe", Shape(p=1, n=3, m=2))).ranks[0])
    assert slots.capacity == (3,)
    assert [slots.places[Unit(0, i, 0)].slot for i in range(3)] == [0, 1, 2]
    assert [slots.places[Unit(1, i, 0)].slot for i in range(3)] == [2, 1, 0]
    assert [slots.places[Unit(1, i, 0)].past for i in range(3)] == [(), ((2, 3),), ((1, 3),)]


def test_slots_freed_too_early_are_seen() -> None:
    plan = forward_only(build("slimpipe", Shape(p=1, n=3, m=2)))
    slots = assign_kv_slots(plan.shape, plan.ranks[0])
    first, second = slots.places[Unit(0, 0, 0)], slots.places[Unit(0, 2, 0)]
    slots.places[Unit(0, 2, 0)] = replace(second, slot=first.slot)
    with pytest.raises(PlanError, match=r"F0.2@0.*KV slot 0 still holds unit 0.0@0"):
        prove_rank_slots(plan, 0, slots)


BROKEN: list[tuple[Callable[[Tokens], None], str]] = [
    (after("B0.0@0", "F0.3@0"), "expected no backward in an evaluation's plan"),
    (drop("F1.2@1"), r"F1.2@1 is missing"),
    (swap("F0.1@0", "F0.2@0"), "slices of a microbatch run forward ascending"),
    (replaced("L0.1@1", "T0.1@1"), "expected passes E, H, S, L alone"),
    (drop("L0.1@1"), "L0.1@1 is missing"),
    (swap("S0.1@1", "L0.1@1"), "expected S0.1@1 before it"),
    (after("L0.1@1", "L0.1@1"), "expected each pass once"),
]


@pytest.mark.parametrize(("edit", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_broken_plans_are_refused(edit: Callable[[Tokens], None], message: str) -> None:
    plan, _ = made(("slimpipe", Shape(p=2, v=2, n=4, m=2)), vocabulary=True)
    check(plan, forward_only=True)
    with pytest.raises(PlanError, match=message):
        check(edited(plan, 1, edit), forward_only=True)


def test_a_training_plan_is_no_evaluation_and_the_other_way_round() -> None:
    plan = build("slimpipe", Shape(p=2, n=2, m=1))
    with pytest.raises(PlanError, match="expected no backward"):
        check(plan, forward_only=True)
    with pytest.raises(PlanError, match="is missing"):
        check(forward_only(plan))
    with pytest.raises(PlanError, match="before all other passes"):
        forward_only(lower(plan))
    assert Op.LOSS.is_vocabulary
