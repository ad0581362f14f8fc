"""KV slots: exact capacity, and every past one range where n >= 2p, two at most elsewhere (docs/architecture.md)."""

from __future__ import annotations

from itertools import pairwise

import pytest

from slimpipe.schedule import Action, Op, Plan, RankSlots, Shape, Unit, assign_kv_slots, build, supported
from slimpipe.schedule.kv_slots import Ranges, join
from slimpipe.schedule.proofs.slots import prove_rank_slots
from tests.schedule.shapes import cases


def slots_of(plan: Plan, rank: int) -> RankSlots:
    slots = assign_kv_slots(plan.shape, plan.ranks[rank])
    prove_rank_slots(plan, rank, slots)
    return slots


def test_by_hand() -> None:
    """p = 2, n = 4, m = 2 on rank 0: six slots. Microbatch 0 grows from the left, 1 from the right."""
    slots = slots_of(build("slimpipe", Shape(p=2, n=4, m=2)), 0)
    assert slots.capacity == (6,)
    assert [slots.places[Unit(0, i, 0)].slot for i in range(4)] == [0, 1, 2, 3]
    assert [slots.places[Unit(1, i, 0)].slot for i in range(4)] == [5, 4, 3, 2]
    assert [slots.places[Unit(1, i, 0)].past for i in range(4)] == [(), ((5, 6),), ((4, 6),), ((3, 6),)]


def test_steady_state_takes_what_the_last_backward_freed() -> None:
    """On the last rank each forward but a microbatch's first takes the slot that the backward before it freed."""
    plan = build("slimpipe", Shape(p=4, n=16, m=4))
    slots = slots_of(plan, 3)
    actions = plan.ranks[3]
    for backward, forward in pairwise(actions):
        if backward.op is Op.BACKWARD and forward.op is Op.FORWARD:
            assert slots.places[forward.unit].slot == slots.places[backward.unit].slot


def test_several_chunks_have_buffers_of_their_own() -> None:
    plan = build("slimpipe", Shape(p=4, v=2, n=8, m=2))
    slots = slots_of(plan, 0)
    assert len(slots.capacity) == 2
    assert sum(slots.capacity) >= 8 * 2 + 2 * 3


def test_join() -> None:
    ranges: Ranges = ()
    for slot in [3, 1, 2, 7, 5, 8]:
        ranges = join(ranges, slot)
    assert ranges == ((1, 4), (5, 6), (7, 9))


@pytest.mark.parametrize("p", range(2, 9))
def test_ranges_over_the_grid(p: int) -> None:
    """A cut through a grid (p 2-8, n 1..4p+2, v 1-5, m 1-7, every rank), which passes whole."""
    slices = sorted({1, 2, 3, p - 1, p, p + 1, 2 * p - 2, 2 * p - 1, 2 * p, 2 * p + 1, 3 * p, 4 * p, 4 * p + 2} - {0})
    for _, shape in cases([p], [1, 2, 5] if p < 5 else [1, 3], slices, [1, 2, 3, 6], ["slimpipe"]):
        most = ranges_at_most(shape)
        assert most <= (1 if shape.n >= 2 * p else 2), shape


def ranges_at_most(shape: Shape) -> int:
    plan = build("slimpipe", shape)
    pasts = (place.past for rank in range(shape.p) for place in slots_of(plan, rank).places.values())
    return max(map(len, pasts))


def test_two_ranges_do_occur_with_few_slices() -> None:
    """The bound is met, so that what handles two ranges is not dead code."""
    assert any(ranges_at_most(shape) == 2 for _, shape in cases([8], [1], range(4, 16), [3, 5], ["slimpipe"]))


def test_capacity_is_the_peak_in_flight_with_one_chunk() -> None:
    for _, shape in cases([2, 4, 7], [1], [1, 3, 4, 8, 15], [1, 2, 5], ["slimpipe"]):
        plan = build("slimpipe", shape)
        for rank in range(shape.p):
            expected = min(shape.n + 2 * (shape.p - 1 - rank), shape.units)
            assert slots_of(plan, rank).capacity == (expected,)


def test_plans_from_elsewhere_fit_too() -> None:
    """Any sound order is served, here all forwards before all backwards of three microbatches (TeraPipe's)."""
    shape = Shape(p=1, n=3, m=3)
    tokens = [f"F{m}.{i}@0" for m in range(3) for i in range(3)]
    tokens += [f"B{m}.{i}@0" for m in range(3) for i in (2, 1, 0)]
    plan = Plan("terapipe", shape, (tuple(map(Action.parse, tokens)),))
    assert slots_of(plan, 0).capacity == (9,)
    assert supported("terapipe", shape) is not None
