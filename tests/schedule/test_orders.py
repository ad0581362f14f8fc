"""Compute orders against lists written by hand, and against the paper's rules stated another way."""

from __future__ import annotations

import pytest
from hypothesis import given

from slimpipe.schedule import BUILT, NOT_BUILT, Op, Plan, PlanError, Shape, Unit, build, check, supported
from slimpipe.schedule.orders.slimpipe import slice_group
from tests.schedule.shapes import slimpipe_shapes


def tokens(plan: Plan) -> list[str]:
    return [" ".join(map(str, actions)).replace("@0", "") for actions in plan.ranks]


def test_gpipe_runs_all_forwards_first() -> None:
    assert tokens(build("gpipe", Shape(p=2, m=3))) == ["F0.0 F1.0 F2.0 B0.0 B1.0 B2.0"] * 2


def test_1f1b() -> None:
    assert tokens(build("1f1b", Shape(p=3, m=4))) == [
        "F0.0 F1.0 F2.0 B0.0 F3.0 B1.0 B2.0 B3.0",
        "F0.0 F1.0 B0.0 F2.0 B1.0 F3.0 B2.0 B3.0",
        "F0.0 B0.0 F1.0 B1.0 F2.0 B2.0 F3.0 B3.0",
    ]


def test_interleaved_as_megatron_has_it() -> None:
    """p = 2, two chunks, m = 4: rank 0 warms up with (p-1) 2 + (v-1) p = 4 forwards, rank 1 with 2."""
    assert tokens(build("interleaved", Shape(p=2, v=2, m=4))) == [
        "F0.0 F1.0 F0.0@1 F1.0@1 F2.0 B0.0@1 F3.0 B1.0@1 F2.0@1 B0.0 F3.0@1 B1.0 B2.0@1 B3.0@1 B2.0 B3.0",
        "F0.0 F1.0 F0.0@1 B0.0@1 F1.0@1 B1.0@1 F2.0 B0.0 F3.0 B1.0 F2.0@1 B2.0@1 F3.0@1 B3.0@1 B2.0 B3.0",
    ]


def test_slimpipe_one_chunk() -> None:
    """W_0 = n + 2 = 5 and W_1 = n = 3: one forward less, then pairs."""
    assert tokens(build("slimpipe", Shape(p=2, n=3, m=2))) == [
        "F0.0 F0.1 F0.2 F1.0 F1.1 B0.2 F1.2 B0.1 B0.0 B1.2 B1.1 B1.0",
        "F0.0 F0.1 F0.2 B0.2 F1.0 B0.1 F1.1 B0.0 F1.2 B1.2 B1.1 B1.0",
    ]


def test_slimpipe_two_chunks() -> None:
    """Groups of G = 2 slices go through both chunks before the next group; backwards are the exact reverse."""
    plan = build("slimpipe", Shape(p=2, v=2, n=4, m=1))
    assert tokens(plan)[1] == (
        "F0.0 F0.1 F0.0@1 F0.1@1 F0.2 F0.3 F0.2@1 F0.3@1 B0.3@1 B0.2@1 B0.3 B0.2 B0.1@1 B0.0@1 B0.1 B0.0"
    )


@pytest.mark.parametrize(("p", "n", "group"), [(4, 16, 4), (4, 6, 6), (4, 10, 5), (4, 7, 7), (4, 2, 2), (1, 9, 1)])
def test_slice_group_is_the_smallest_divisor_that_fills_the_pipeline(p: int, n: int, group: int) -> None:
    assert slice_group(Shape(p=p, n=n)) == group


@given(slimpipe_shapes())
def test_slimpipe_keeps_ranks_in_phase(shape: Shape) -> None:
    """Rank r's j-th forward belongs in tick r + j, its k-th backward in tick n v + 2p - 3 - r + k; a tick is a forward
    slot, then a backward slot. Each rank's list is in that order, and each input is made in an earlier tick (the last
    stage's backward: in its own). So at any tick all ranks are in their forward or all in their backward slot."""
    plan = build("slimpipe", shape)
    p = shape.p
    tick: dict[tuple[Op, int, Unit], int] = {}
    for rank in range(p):
        counts = {Op.FORWARD: 0, Op.BACKWARD: 0}
        slots = []
        for action in plan.ranks[rank]:
            forward = action.op is Op.FORWARD
            first = rank if forward else shape.n * shape.v + 2 * p - 3 - rank
            at = first + counts[action.op]
            counts[action.op] += 1
            tick[action.op, rank, action.unit] = at
            slots.append((at, not forward))
        assert slots == sorted(slots)
    for rank in range(p):
        for action in plan.ranks[rank]:
            made = plan.producer(rank, action)
            if made is not None:
                assert tick[(action.op, *made)] < tick[action.op, rank, action.unit]
            if action.op is Op.BACKWARD:
                assert tick[Op.FORWARD, rank, action.unit] <= tick[action.op, rank, action.unit]


@given(slimpipe_shapes())
def test_slimpipe_holds_at_most_w_r_units(shape: Shape) -> None:
    plan = build("slimpipe", shape)
    limits = [shape.n * shape.v + 2 * (shape.p - 1 - rank) for rank in range(shape.p)]
    assert check(plan).units == tuple(min(limit, shape.units) for limit in limits)


@pytest.mark.parametrize("name", BUILT)
def test_one_rank_runs_every_schedule(name: str) -> None:
    for shape in (Shape(1, 1, 1, 1), Shape(1, 1, 1, 3), Shape(1, 2, 1, 3), Shape(1, 3, 4, 2)):
        if supported(name, shape) is None:
            check(build(name, shape))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("slimpipe", Shape(4, 2, 1, 1), "pipeline.virtual_stages = 2 needs pipeline.slices >= parallel.pp (4): "
         "pipeline.slices = 1; use 4, 8, ... slices or pipeline.virtual_stages = 1"),
        ("slimpipe", Shape(8, 2, 7, 4), "use 8, 16, ..."),
        ("1f1b", Shape(4, 1, 2, 4), "pipeline.slices = 2: pipeline.schedule = 1f1b runs whole microbatches"),
        ("gpipe", Shape(4, 2, 1, 4), "pipeline.virtual_stages = 2: pipeline.schedule = gpipe has one stage a rank"),
        ("interleaved", Shape(4, 2, 1, 6), "train.global_batch gives m = 6 microbatches"),
        ("interleaved", Shape(4, 2, 1, 6), "parallel.pp (4); use a batch that gives 8, 12, ..."),
        ("interleaved", Shape(4, 2, 4, 4), "pipeline.slices = 4: pipeline.schedule = interleaved"),
        ("zigzag", Shape(2), "pipeline.schedule = zigzag: unknown; use one of gpipe, 1f1b, interleaved, slimpipe"),
        *((name, Shape(2), f"pipeline.schedule = {name}: designed but not built") for name in NOT_BUILT),
    ],
)  # fmt: skip
def test_refusals_name_the_setting_to_change(name: str, shape: Shape, message: str) -> None:
    reason = supported(name, shape)
    assert reason is not None
    assert message in reason
    with pytest.raises(PlanError) as error:
        build(name, shape)
    assert str(error.value) == reason
