"""Plans under NCCL's rules: what is safe, and that the replay finds what is not (docs/architecture.md)."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import pytest
from hypothesis import given

from slimpipe.schedule import (
    Action,
    Link,
    Plan,
    PlanError,
    Shape,
    build,
    check,
    least_send_window,
    links,
    lower,
    replay_in_order,
)
from slimpipe.schedule.orders.slimpipe import slice_group
from tests.schedule.shapes import Case, cases, supported_cases


def one_per_kind(kind: str, src: int, dst: int) -> Hashable:
    return kind


def needs_wide_window(shape: Shape) -> bool:
    """Whether a group of slices comes round to rank 0 three or more slices before rank 0 has time for it."""
    return shape.v > 1 and slice_group(shape) - shape.p > 2


def test_every_shape_runs_with_one_communicator_a_link() -> None:
    count = 0
    shapes = [
        *cases([1, 2, 3, 4, 6, 8], [1, 2, 3], [1, 2, 3, 4, 6, 8, 12, 16], [1, 2, 3, 5], ["slimpipe"]),
        *cases([1, 2, 4, 8], [1, 2, 3], [1], [1, 2, 8, 16], ["gpipe", "1f1b", "interleaved"]),
    ]
    for name, shape in shapes:
        if needs_wide_window(shape):
            continue
        plan = lower(build(name, shape))
        report = replay_in_order(plan, send_window=2)
        assert set(report.transfers) == set(links(plan))
        assert sum(report.transfers.values()) == 2 * shape.m * shape.n * (shape.stages - 1) * (shape.p > 1)
        assert max(report.most_sends) <= 2 * 2  # a window for each of the links that a rank sends on
        # A compute's own receive and those of the two after it.
        assert max(report.most_receives) <= 3
        count += 1
    assert count > 300


@given(supported_cases())
def test_any_shape_runs_under_its_least_send_window(case: Case) -> None:
    """And that is G - p on the wrap: a group longer than the pipeline waits in rank p-1's buffers."""
    name, shape = case
    plan = lower(build(name, shape))
    window = least_send_window(plan)
    replay_in_order(plan, send_window=window)
    if window > 1:
        with pytest.raises(PlanError, match="send_window"):
            replay_in_order(plan, send_window=window - 1)
    if shape.p == 1 or name != "slimpipe" or shape.v == 1:
        assert window == 1
    elif shape.m > 1:
        assert window == max(1, slice_group(shape) - shape.p)


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("v", [2, 3])
def test_one_communicator_for_all_forwards_deadlocks_with_several_chunks(p: int, v: int) -> None:
    """The wrap p-1 -> 0 queues with r -> r+1: each rank's receive stands behind one that the other must first feed."""
    for n in (p, p + 1, 2 * p, 4 * p):
        for m in (2, 3):
            plan = lower(build("slimpipe", Shape(p, v, n, m)))
            check(plan)
            # A window that never closes, so that nothing but the shared queue can stop the plan.
            replay_in_order(plan, send_window=1000)
            with pytest.raises(PlanError, match="deadlock in order of posting") as error:
                replay_in_order(plan, send_window=1000, communicator=one_per_kind)
            for rank in range(p):
                assert f"rank {rank} at action " in str(error.value)


def test_one_communicator_for_all_forwards_is_enough_with_one_chunk() -> None:
    for _, shape in cases([2, 3, 4], [1], [1, 4, 8], [1, 2, 4], ["slimpipe"]):
        replay_in_order(lower(build("slimpipe", shape)), communicator=one_per_kind)


def plan_of(shape: Shape, *ranks: str) -> Plan:
    return Plan("by hand", shape, tuple(tuple(map(Action.parse, rank.split())) for rank in ranks))


RECEIVER = "F0.0@0 F1.0@0 B0.0@0 SB0.0@0>0 B1.0@0 SB1.0@0>0"
SENDER = "F0.0@0 SF0.0@0>1 F1.0@0 SF1.0@0>1 RB0.0@0<1 B0.0@0 RB1.0@0<1 B1.0@0"


def test_wrong_data_is_found() -> None:
    """Receives in another order than the sends: NCCL would not notice."""
    plan = plan_of(Shape(p=2, m=2), SENDER, f"RF1.0@0<0 RF0.0@0<0 {RECEIVER}")
    with pytest.raises(PlanError, match=r"rank 1, action 0 \(RF1.0@0<0\): wrong data matched on link F 0>1") as error:
        replay_in_order(plan)
    assert "microbatch 0, slice 0 out of stage 0 (rank 0, action 1, SF0.0@0>1) arrives" in str(error.value)


def test_send_nobody_receives_is_found() -> None:
    plan = plan_of(Shape(p=2, m=2), f"{SENDER} SF1.0@0>1", f"RF0.0@0<0 RF1.0@0<0 {RECEIVER}")
    with pytest.raises(PlanError, match=r"rank 0, action 8 \(SF1.0@0>1\): peer 1 never met it"):
        replay_in_order(plan)


def test_the_window_counts_sends_under_way() -> None:
    """G = 5, p = 2: rank 1 has made slices 0 to 2 of chunk 0 before rank 0, still busy with slice 4, asks for any."""
    shape = Shape(p=2, v=2, n=5, m=2)
    plan = lower(build("slimpipe", shape))
    assert least_send_window(plan) == 3
    with pytest.raises(PlanError, match="earlier sends on link F 1>0 have not completed") as error:
        replay_in_order(plan, send_window=2)
    assert "least_send_window" in str(error.value)


def test_report_counts() -> None:
    plan = plan_of(Shape(p=2, m=2), SENDER, f"RF0.0@0<0 RF1.0@0<0 {RECEIVER}")
    report = replay_in_order(plan)
    assert report.transfers == {Link("F", 0, 1): 2, Link("B", 1, 0): 2}
    assert report.most_receives[1] <= 2
    assert set(report.most_sends) <= {1, 2}


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: replay_in_order(lower(build("1f1b", Shape(2, m=2))), send_window=0), "send_window = 0"),
        (lambda: replay_in_order(build("1f1b", Shape(2, m=2))), "lower it first"),
    ],
)
def test_refusals(call: Callable[[], object], why: str) -> None:
    with pytest.raises(PlanError, match=why):
        call()
