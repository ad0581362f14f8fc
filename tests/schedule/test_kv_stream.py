"""Keys and values in host memory: what each layer copies is what it needs, and the simulator charges for it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from slimpipe.schedule import (
    HostLinks,
    KVStream,
    Op,
    Plan,
    PlanError,
    Rate,
    Shape,
    Timeline,
    Unit,
    UnitBytes,
    add_swap,
    assign_kv_slots,
    build,
    draw_svg,
    equal_costs,
    forward_only,
    grid,
    lower,
    moves_of,
    share_swap,
    simulate,
)
from tests.schedule.shapes import slimpipe_shapes


def stream(shape: Shape, layers: int = 2, keys: int = 1, gradients: int = 2) -> KVStream:
    return KVStream((True,) * shape.p, ((layers,) * shape.v,) * shape.p, keys, gradients if shape.n > 1 else 0)


def on_paper(plan: Plan, kv: KVStream | None, rate: Rate, sizes: UnitBytes | None = None) -> Timeline:
    return simulate(plan, equal_costs(), host=HostLinks(plan.shape.p, sizes, rate, kv))


# ---- what is copied ----


@settings(max_examples=60)
@given(slimpipe_shapes(p=4, v=2, n=8, m=3))
def test_each_layer_finds_what_it_needs(shape: Shape) -> None:
    """One layer's slots, their room on the device thrown away behind every action: a forward finds its past's keys, a
    backward those and its own, and of its own gradients the parts of all later slices."""
    plan = build("slimpipe", shape)
    for rank in range(shape.p):
        slots = assign_kv_slots(shape, plan.compute(rank))
        keys: dict[tuple[int, int], Unit] = {}
        gradients: dict[tuple[int, int], set[int]] = {}
        for action in plan.compute(rank):
            unit, place = action.unit, slots.places[action.unit]
            moves = moves_of(shape, slots, action)
            here = {slot: keys[unit.chunk, slot] for start, stop in moves.keys_in for slot in range(start, stop)}
            past = {slot for start, stop in place.past for slot in range(start, stop)}
            if action.op is Op.FORWARD:
                here[place.slot] = unit
            assert set(here) == past | {place.slot}
            assert {found.slice for found in here.values()} == set(range(unit.slice + 1))
            assert {(found.microbatch, found.chunk) for found in here.values()} == {(unit.microbatch, unit.chunk)}
            for start, stop in moves.keys_out:
                keys.update({(unit.chunk, slot): here[slot] for slot in range(start, stop)})
            if action.op is Op.FORWARD:
                assert moves.gradients_in == moves.gradients_out == ()
                continue
            came = [slot for start, stop in moves.gradients_in for slot in range(start, stop)]
            sums = {slot: gradients[unit.chunk, slot] for slot in came}
            assert sums.get(place.slot, set()) == set(range(unit.slice + 1, shape.n))
            for slot in past:
                # The last slice's backward stores, whatever was there.
                sums[slot] = {unit.slice} if unit.slice == shape.n - 1 else sums[slot] | {unit.slice}
            for start, stop in moves.gradients_out:
                gradients.update({(unit.chunk, slot): sums[slot] for slot in range(start, stop)})


def test_bytes_of_a_step() -> None:
    """One rank, one layer, four slices: forwards read 0 + 1 + 2 + 3 slots of keys and write 4; backwards read 4 + 3 + 2
    + 1, of gradients the same but for the last slice's, and write 3 + 2 + 1."""
    shape = Shape(p=1, n=4)
    plan = build("slimpipe", shape)
    slots = assign_kv_slots(shape, plan.compute(0))
    assert stream(shape, layers=1, keys=10, gradients=1).moved(plan, 0, slots) == (40 + 6, 60 + 100 + 6)
    assert stream(shape, layers=3, keys=10, gradients=1).moved(plan, 0, slots) == (138, 498)
    assert stream(shape, layers=3, keys=10, gradients=1).on_host(0, slots.capacity) == 4 * 3 * 11
    assert KVStream((False,), ((3,),), 10, 1).moved(plan, 0, slots) == (0, 0)


# ---- what it takes ----


def test_by_hand() -> None:
    """One layer: each action is the next of the same layer, and waits for what the one before has just written."""
    timeline = on_paper(build("slimpipe", Shape(p=1, n=2)), stream(Shape(p=1, n=2), layers=1), Rate(0.0, 1.0))
    assert [(str(span.action), span.start, span.end) for span in timeline.spans[0]] == [
        ("F0.0@0", 0.0, 1.0),  # its keys are on the host at 2, and back at 3
        ("F0.1@0", 1.0, 4.0),  # from 3; its keys are on the host at 5, and back at 6
        ("B0.1@0", 4.0, 8.0),  # from 6; two bytes of gradients are on the host at 10, and back at 12
        ("B0.0@0", 8.0, 14.0),
    ]
    assert timeline.keys_waited == (8.0,)
    assert timeline.idle == (8.0,)


def test_gradients_by_hand() -> None:
    """Two layers, and keys that weigh nothing: gradients come in where those of two layers before were, once these are
    on the host."""
    shape = Shape(p=1, n=3)
    timeline = on_paper(build("slimpipe", shape), stream(shape, layers=2, keys=0), Rate(0.0, 1.0))
    assert [(str(span.action), span.start, span.end) for span in timeline.spans[0][3:]] == [
        ("B0.2@0", 3.0, 5.0),  # four bytes of its layers are on the host at 8 and at 12
        ("B0.1@0", 5.0, 17.0),  # layer 1 has its own from 12, layer 0 from 16; two bytes are on the host at 15 and 19
        ("B0.0@0", 17.0, 22.0),  # from 18 and from 21
    ]
    assert timeline.keys_waited == (13.0,)


@settings(max_examples=40)
@given(slimpipe_shapes(p=4, v=2, n=8, m=3))
def test_time_on_the_link(shape: Shape) -> None:
    plan, kv = lower(build("slimpipe", shape)), stream(shape, layers=4)
    plain = simulate(plan, equal_costs())
    assert on_paper(plan, kv, Rate(0.0, float("inf"))).makespan == pytest.approx(plain.makespan)
    slow = on_paper(plan, kv, Rate(0.0, 2.0))
    for rank in range(shape.p):
        slots = assign_kv_slots(shape, plan.compute(rank))
        for inward, moved in zip((False, True), kv.moved(plan, rank, slots), strict=True):
            copies = [copy for copy in slow.copies if (copy.rank, copy.inward) == (rank, inward)]
            assert all(copy.keys for copy in copies)
            assert sum(copy.end - copy.start for copy in copies) == pytest.approx(moved / 2.0)
            assert all(a.end <= b.start + 1e-9 for a, b in zip(copies, copies[1:], strict=False))
            assert slow.makespan >= moved / 2.0
        spent = sum(span.end - span.start for span in slow.spans[rank])
        work = sum(span.end - span.start for span in plain.spans[rank])
        assert spent == pytest.approx(work + slow.keys_waited[rank])


def test_beside_units_each_gets_half_the_link() -> None:
    shape = Shape(p=2, n=8, m=2)
    plan, kv = lower(build("slimpipe", shape)), stream(shape)
    sizes = UnitBytes.equal(shape)
    swap = share_swap(simulate(plan, equal_costs()), sizes, Rate(0.0, 100.0), 0.5)
    both = on_paper(add_swap(plan, swap), kv, Rate(0.0, 100.0), sizes)
    alone = on_paper(plan, kv, Rate(0.0, 100.0))
    taken = [sum(copy.end - copy.start for copy in found.copies if copy.keys) for found in (both, alone)]
    assert taken[0] == pytest.approx(2 * taken[1])
    assert {copy.keys for copy in both.copies} == {False, True}


def test_an_evaluation_streams_too() -> None:
    shape = Shape(p=2, n=4, m=2)
    timeline = simulate(
        forward_only(build("slimpipe", shape)), equal_costs(), host=HostLinks(2, None, Rate(0.0, 1.0), stream(shape))
    )
    assert timeline.copies and min(timeline.keys_waited) > 0


def test_shown() -> None:
    shape = Shape(p=1, n=2)
    timeline = on_paper(build("slimpipe", shape), stream(shape, layers=1), Rate(0.0, 1.0))
    assert grid(timeline, tick=1.0).splitlines() == [
        "tick       0     1     2     3     4     5     6     7     8     9    10    11    12    13",
        "rank 0  F0.0  F0.1     -     -  B0.1     -     -     -  B0.0     -     -     -     -     -",
        "  out      .  K0.0     .     .  K0.1     .     .     .  K0.1     -     .     .     .     .",
        "  back  K0.1     .     .  K0.1     -     .  K0.0  K0.0     -     .     .     .     .     .",
    ]
    assert "keys to host" in draw_svg(timeline) and ">to host<" not in draw_svg(timeline)


def test_made_for_another_plan() -> None:
    plan = build("slimpipe", Shape(p=2, n=4))
    for kv in (stream(Shape(p=3, n=4)), stream(Shape(p=2, v=2, n=4))):
        with pytest.raises(PlanError, match=r"keys and values do not stream for p = 2, v = 1"):
            on_paper(plan, kv, Rate(0.0, 1.0))
