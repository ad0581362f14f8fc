"""The checker on sound plans, and on plans broken in every way that it promises to find."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimpipe.schedule import (
    Action,
    Plan,
    PlanError,
    RankSlots,
    Shape,
    SlotPlace,
    assign_kv_slots,
    build,
    check,
    equal_costs,
    lower,
    replay_in_order,
    simulate,
)
from slimpipe.schedule.proofs.slots import prove_rank_slots
from tests.schedule.shapes import Case, supported_cases

SHAPE = Shape(p=3, v=2, n=6, m=2)
Tokens = list[str]


@pytest.fixture(scope="module")
def sound() -> Plan:
    return build("slimpipe", SHAPE)


@pytest.fixture(scope="module")
def lowered(sound: Plan) -> Plan:
    return lower(sound)


def edited(plan: Plan, rank: int, edit: Callable[[Tokens], None]) -> Plan:
    tokens = [str(action) for action in plan.ranks[rank]]
    edit(tokens)
    ranks = list(plan.ranks)
    ranks[rank] = tuple(map(Action.parse, tokens))
    return Plan(plan.name, plan.shape, tuple(ranks))


def swap(a: str, b: str) -> Callable[[Tokens], None]:
    def edit(tokens: Tokens) -> None:
        i, j = tokens.index(a), tokens.index(b)
        tokens[i], tokens[j] = tokens[j], tokens[i]

    return edit


def drop(token: str) -> Callable[[Tokens], None]:
    return lambda tokens: tokens.remove(token)


def after(token: str, anchor: str) -> Callable[[Tokens], None]:
    """Insert a token right after another."""
    return lambda tokens: tokens.insert(tokens.index(anchor) + 1, token)


def move(token: str, anchor: str) -> Callable[[Tokens], None]:
    """Move a token to right after another."""

    def edit(tokens: Tokens) -> None:
        tokens.remove(token)
        tokens.insert(tokens.index(anchor) + 1, token)

    return edit


def replaced(token: str, by: str) -> Callable[[Tokens], None]:
    def edit(tokens: Tokens) -> None:
        tokens[tokens.index(token)] = by

    return edit


COMPUTE_MUTATIONS = {
    "slices forward out of order": (1, swap("F0.1@0", "F0.2@0"), "F0.2@0", "expected F0.1@0"),
    "slices backward out of order": (1, swap("B0.3@1", "B0.4@1"), "B0.3@1", "expected B0.4@1"),
    "last slice's backward not first": (1, swap("B0.4@1", "B0.5@1"), "B0.4@1", "expected B0.5@1"),
    "a unit twice": (0, after("F0.1@0", "F0.1@0"), "F0.1@0", "expected each unit once"),
    "a backward twice": (2, after("B0.5@1", "B0.5@1"), "B0.5@1", "expected each unit once"),
    "a forward missing": (2, drop("F1.5@1"), "B1.5@1", "expected F1.5@1 earlier"),
    "a backward missing": (2, drop("B1.0@0"), "end of list", "B1.0@0 is missing"),
    "backward before forward": (2, swap("F1.5@1", "B1.5@1"), "B1.5@1", "backward before its forward"),
    "a microbatch too many": (0, replaced("F1.5@1", "F2.5@1"), "F2.5@1", "outside the shape"),
    "a slice too many": (0, replaced("F1.5@1", "F1.6@1"), "F1.6@1", "outside the shape"),
    "a chunk too many": (0, replaced("F1.5@1", "F1.5@2"), "F1.5@2", "outside the shape"),
}

TRANSFER_MUTATIONS = {
    "receive missing": (1, drop("RF0.2@0<0"), "F0.2@0", "expected RF0.2@0<0 before it"),
    "gradient's receive missing": (0, drop("RB0.5@1<1"), "B0.5@1", "expected RB0.5@1<1 before it"),
    "receive after its compute": (1, move("RF0.2@0<0", "F0.2@0"), "F0.2@0", "expected RF0.2@0<0 before it"),
    "receive twice": (1, after("RF0.2@0<0", "RF0.2@0<0"), "RF0.2@0<0", "expected each transfer once"),
    "send missing": (0, drop("SF0.2@0>1"), "RF0.2@0<0", "rank 0 never sends"),
    "send twice": (0, after("SF0.2@0>1", "SF0.2@0>1"), "SF0.2@0>1", "expected each transfer once"),
    "send before its compute": (0, swap("F0.2@0", "SF0.2@0>1"), "SF0.2@0>1", "expected F0.2@0 before it"),
    "sends swapped": (0, swap("SF0.1@0>1", "SF0.2@0>1"), "SF0.2@0>1", "expected F0.2@0 before it"),
    "sends swapped on a link": (0, move("SF0.1@0>1", "SF0.2@0>1"), "SF0.2@0>1", "in different orders"),
    "wrong peer": (0, replaced("SF0.1@0>1", "SF0.1@0>2"), "SF0.1@0>2", "from rank 0 to rank 1"),
    "transfer past the last stage": (2, after("SF0.0@1>0", "F0.0@1"), "SF0.0@1>0", "no such tensor"),
    "transfer before the first stage": (0, after("RF0.0@0<2", "F0.0@0"), "RF0.0@0<2", "no such tensor"),
    "transfer outside the shape": (1, after("RF9.0@0<0", "F0.0@0"), "RF9.0@0<0", "outside the shape"),
}


def refused(plan: Plan, rank: int, token: str, why: str) -> None:
    """The message names rank and token, says why, and marks the place."""
    with pytest.raises(PlanError) as error:
        check(plan)
    message = str(error.value)
    mark = ">end<" if token == "end of list" else f">{token}<"
    assert f"rank {rank}, action " in message
    assert f"({token})" in message
    assert why in message
    row = next(line for line in message.splitlines() if line.startswith(f"rank {rank} "))
    assert mark in row
    assert message.count(mark) == 1


@pytest.mark.parametrize("what", COMPUTE_MUTATIONS)
def test_broken_order_is_refused(sound: Plan, what: str) -> None:
    rank, edit, token, why = COMPUTE_MUTATIONS[what]
    refused(edited(sound, rank, edit), rank, token, why)


@pytest.mark.parametrize("what", COMPUTE_MUTATIONS)
def test_broken_order_is_refused_in_a_lowered_plan(lowered: Plan, what: str) -> None:
    rank, edit, token, why = COMPUTE_MUTATIONS[what]
    refused(edited(lowered, rank, edit), rank, token, why)


@pytest.mark.parametrize("what", TRANSFER_MUTATIONS)
def test_broken_transfer_is_refused(lowered: Plan, what: str) -> None:
    rank, edit, token, why = TRANSFER_MUTATIONS[what]
    # A send that is missing shows where its tensor is awaited.
    refused(edited(lowered, rank, edit), 1 if what == "send missing" else rank, token, why)


def test_deadlock_is_refused() -> None:
    """Each rank waits for the other: rank 0 for a gradient before it has sent the activation that rank 1 runs first."""
    plan = build("1f1b", Shape(p=2, m=2))
    crossed = edited(edited(plan, 0, swap("F1.0@0", "B0.0@0")), 1, swap("F0.0@0", "F1.0@0"))
    crossed = edited(crossed, 1, swap("B0.0@0", "B1.0@0"))
    with pytest.raises(PlanError) as error:
        check(crossed)
    message = str(error.value)
    assert "rank 0, action 1 (B0.0@0): deadlock" in message
    assert "rank 0 at action 1 (B0.0@0) waits for rank 1, action 3 (B0.0@0)" in message
    assert "rank 1 at action 0 (F1.0@0) waits for rank 0, action 2 (F1.0@0)" in message
    assert ">B0.0@0<" in message
    with pytest.raises(PlanError, match="deadlock"):
        simulate(crossed, equal_costs())


def test_ranks_must_be_as_many_as_the_shape_says(sound: Plan) -> None:
    with pytest.raises(PlanError, match="2 ranks, but p = 3"):
        check(Plan(sound.name, sound.shape, sound.ranks[:2]))


@given(supported_cases())
def test_sound_plans_pass_with_and_without_transfers(case: Case) -> None:
    plan = build(*case)
    peaks = check(plan)
    assert check(lower(plan)) == peaks
    assert peaks.units == simulate(plan, equal_costs()).peak_units


@given(supported_cases(), st.randoms(use_true_random=False))
def test_a_lost_or_doubled_action_is_refused(case: Case, rng: random.Random) -> None:
    """Whatever it is and wherever it stands."""
    plan = lower(build(*case))
    rank = rng.randrange(plan.shape.p)
    index = rng.randrange(len(plan.ranks[rank]))
    for edit in (lambda tokens: tokens.pop(index), lambda tokens: tokens.insert(index, tokens[index])):
        with pytest.raises(PlanError):
            check(edited(plan, rank, edit))


@given(supported_cases(), st.randoms(use_true_random=False))
def test_what_passes_runs(case: Case, rng: random.Random) -> None:
    """Swap two actions of a rank: the checker refuses it, or it runs to the end with every unit done."""
    plan = lower(build(*case))
    rank = rng.randrange(plan.shape.p)
    i = rng.randrange(len(plan.ranks[rank]))
    j = min(i + rng.randrange(1, 4), len(plan.ranks[rank]) - 1)

    def exchange(tokens: Tokens) -> None:
        tokens[i], tokens[j] = tokens[j], tokens[i]

    swapped = edited(plan, rank, exchange)
    try:
        check(swapped)
    except PlanError:
        return
    assert sum(map(len, simulate(swapped, equal_costs()).spans)) == 2 * plan.shape.units * plan.shape.p
    replay_in_order(swapped, send_window=plan.shape.units)


# ---- KV slots: the proof itself, on slots broken by hand ----


def test_wrong_slots_are_refused() -> None:
    plan = build("slimpipe", Shape(p=2, n=4, m=2))
    slots = assign_kv_slots(plan.shape, plan.ranks[0])
    prove_rank_slots(plan, 0, slots)
    unit = Action.parse("F0.2@0").unit
    good = slots.places[unit]
    assert good == SlotPlace(2, ((0, 2),))
    for place, why in (
        (SlotPlace(1, good.past), "KV slot 1 still holds unit 0.1@0"),
        (SlotPlace(99, good.past), "KV slot 99 is outside the chunk's 6"),
        (SlotPlace(2, ((0, 1),)), r"past \(\(0, 1\),\): expected ranges of the slots \[0, 1\]"),
        (SlotPlace(2, ((0, 1), (1, 2))), "expected ranges of the slots"),
        (SlotPlace(2, ((0, 0), (0, 2))), "expected ranges of the slots"),
        (SlotPlace(2, ((0, 3),)), "expected ranges of the slots"),
    ):
        broken = RankSlots(slots.capacity, {**slots.places, unit: place})
        with pytest.raises(PlanError, match=rf"rank 0, action 2 \(F0.2@0\): .*{why}"):
            prove_rank_slots(plan, 0, broken)
