"""Swaps on paper: what is chosen is the least, in time and within its budget; the checker refuses what is not; the
simulator charges both directions."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import combinations
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slimpipe.schedule import (
    Action,
    Costs,
    HostLinks,
    Op,
    Plan,
    PlanError,
    Rate,
    Shape,
    Swap,
    Timeline,
    Trip,
    Unit,
    UnitBytes,
    add_exchange,
    add_swap,
    add_vocabulary,
    balance,
    build,
    check,
    draw_svg,
    equal_costs,
    forward_only,
    from_csv,
    grid,
    held_by_units,
    least_swap,
    lower,
    most_held,
    replay_in_order,
    share_swap,
    simulate,
    sliced_costs,
    sliced_work,
    to_csv,
)
from slimpipe.schedule.swap_forced import force
from slimpipe.schedule.swap_units import RankUnits, Window
from tests.schedule.shapes import slimpipe_shapes

FREE = Rate(0.0, 1e12)


def on_paper(plan: Plan, swap: Swap | None = None, link: Rate = FREE, costs: Costs | None = None) -> Timeline:
    host = HostLinks(plan.shape.p, swap.bytes, link) if swap is not None else None
    return simulate(plan, costs or equal_costs(), host=host)


def sizes_of(shape: Shape, weights: tuple[int, ...]) -> UnitBytes:
    """Units of every stage of another size, of which two thirds can go."""
    rows = tuple(
        tuple(3 * weights[shape.stage(rank, chunk) % len(weights)] for chunk in range(shape.v))
        for rank in range(shape.p)
    )
    return UnitBytes(rows, tuple(tuple(2 * size // 3 for size in row) for row in rows))


# ---- what is chosen ----

LINKS = st.builds(Rate, st.sampled_from([0.0, 0.1]), st.sampled_from([0.5, 3.0, 20.0, 1e12]))
WEIGHTS = st.sampled_from([(1,), (1, 2), (5, 1, 3)])


SHAPES = slimpipe_shapes(p=4, v=2, n=8, m=3)


@settings(max_examples=40)
@given(SHAPES, WEIGHTS, LINKS, st.floats(0.05, 1.1), st.sampled_from([0.0, 0.7]))
def test_least_is_sound_and_within_its_budget(
    shape: Shape, weights: tuple[int, ...], link: Rate, part: float, attention: float
) -> None:
    plan = lower(build("slimpipe", shape))
    costs, sizes = sliced_costs(shape.n, attention), sizes_of(shape, weights)
    kept = on_paper(plan, costs=costs)
    peaks = [most_held(actions, sizes.held[r], sizes.movable[r]).device for r, actions in enumerate(plan.ranks)]
    budget = [part * peak for peak in peaks]
    swap = least_swap(kept, sizes, link, budget)
    swapped = add_swap(plan, swap)
    assert check(swapped, swap=swap) == check(plan)
    for rank, actions in enumerate(swapped.ranks):
        held = most_held(actions, sizes.held[rank], sizes.movable[rank])
        assert held.device <= swap.budget[rank] <= max(budget[rank], peaks[rank])
        assert held.host <= swap.moved(rank) <= shape.m * shape.n * sum(sizes.movable[rank])
        if peaks[rank] <= budget[rank]:
            assert swap.trips[rank] == ()
        if swap.budget[rank] > budget[rank]:
            # Out of reach: no unit but the one at work, and those next to it, is there at the worst moment.
            assert not swap.fits
    # A unit's work costs at most what it took and what its copies take, one after the other.
    slack = sum(link.latency + 2 * max(weights) / link.bandwidth for _ in range(4 * shape.units * shape.p))
    assert on_paper(swapped, swap, link, costs).makespan <= kept.makespan + slack + 1e-6


@settings(max_examples=40)
@given(SHAPES, WEIGHTS, LINKS, st.floats(0.0, 1.0))
def test_share_is_sound_and_moves_the_share(shape: Shape, weights: tuple[int, ...], link: Rate, share: float) -> None:
    plan = lower(build("slimpipe", shape))
    sizes = sizes_of(shape, weights)
    swap = share_swap(on_paper(plan), sizes, link, share)
    check(add_swap(plan, swap), swap=swap)
    for rank in range(shape.p):
        computes = list(plan.compute(rank))
        apart = {
            action.unit: computes.index(Action(Op.BACKWARD, action.unit)) - at
            for at, action in enumerate(computes)
            if action.op is Op.FORWARD
        }
        movable = sum(sizes.movable[rank][unit.chunk] for unit in apart)
        can = sum(sizes.movable[rank][unit.chunk] for unit, gap in apart.items() if gap > 1)
        moved, largest = swap.moved(rank), max(sizes.movable[rank])
        assert moved <= share * movable * (1 + 1e-6)
        assert moved > min(share * movable, can) - largest - 1e-6


def test_no_share_and_the_whole_share() -> None:
    plan = build("slimpipe", Shape(2, 1, 8, 2))
    sizes = UnitBytes.equal(plan.shape)
    assert share_swap(on_paper(plan), sizes, FREE, 0.0).trips == ((), ())
    # All but the last rank's last slices, whose backward comes at once.
    assert [len(trips) for trips in share_swap(on_paper(plan), sizes, FREE, 1.0).trips] == [16, 14]
    with pytest.raises(PlanError, match=r"share = 1\.5: must lie between 0 and 1"):
        share_swap(on_paper(plan), sizes, FREE, 1.5)


def fewest(plan: Plan, rank: int, budget: int) -> int | None:
    """Of units of size 1 that may be away between their actions at no cost, by trying every set."""
    computes = plan.compute(rank)
    spans = {
        action.unit: (at, computes.index(Action(Op.BACKWARD, action.unit)))
        for at, action in enumerate(computes)
        if action.op is Op.FORWARD
    }
    for count in range(len(spans) + 1):
        for away in combinations(spans, count):
            held = (
                sum(
                    begin <= at <= end and not (unit in away and begin < at < end)
                    for unit, (begin, end) in spans.items()
                )
                for at in range(len(computes))
            )
            if max(held) <= budget:
                return count
    return None


@pytest.mark.parametrize("shape", [Shape(1, 1, 4, 2), Shape(2, 1, 4, 2), Shape(2, 2, 3, 1), Shape(3, 1, 2, 3)], ids=str)
def test_the_least_is_the_least(shape: Shape) -> None:
    """Against every set of units, where the link takes no time."""
    plan = build("slimpipe", shape)
    kept = on_paper(plan)
    for rank in range(shape.p):
        for budget in range(1, kept.peak_units[rank] + 1):
            swap = least_swap(kept, UnitBytes.equal(shape), FREE, [budget] * shape.p)
            if swap.budget[rank] == budget:
                assert len(swap.trips[rank]) == fewest(plan, rank, budget)
            else:
                assert fewest(plan, rank, budget) is None


def test_what_is_not_needed_is_given_up() -> None:
    """Units of 1 go before the one of 4 that makes up for them all comes into sight."""
    plan = build("slimpipe", Shape(1, 2, 4, 1))
    sizes = UnitBytes(((1, 6),), ((1, 6),))
    kept = on_paper(plan)
    for budget in range(8, 28):
        swap = least_swap(kept, sizes, Rate(0.0, 4.0), [budget])
        for unit in [trip.unit for trip in swap.trips[0]]:
            fewer = replace(swap, trips=(tuple(trip for trip in swap.trips[0] if trip.unit != unit),))
            with pytest.raises(PlanError, match="units in flight hold"):
                check(add_swap(plan, fewer), swap=fewer)


def test_units_near_their_backward_stay() -> None:
    plan = build("slimpipe", Shape(4, 1, 16, 2))
    kept = on_paper(plan)
    swap = least_swap(kept, UnitBytes.equal(plan.shape), Rate(0.0, 1.0), [0.4 * units for units in kept.peak_units])
    assert swap.fits
    for rank, trips in enumerate(swap.trips):
        computes = plan.compute(rank)
        gaps = {
            action.unit: computes.index(Action(Op.BACKWARD, action.unit)) - at
            for at, action in enumerate(computes)
            if action.op is Op.FORWARD
        }
        away = {trip.unit for trip in trips}
        # On the last rank's last slices the backward follows at once, on the first's within 2 (p - 1 - r).
        assert max(gaps.values()) in {gaps[unit] for unit in away}
        assert all(gaps[unit] > 4 for unit in away)
    # And nobody waits: the step is as long as it was.
    swapped = on_paper(add_swap(plan, swap), swap, Rate(0.0, 1.0))
    assert swapped.makespan == kept.makespan
    assert max(swapped.swap_waited) == 0


def test_a_link_too_slow_costs_time_and_not_memory() -> None:
    plan = build("slimpipe", Shape(2, 1, 8, 2))
    kept, slow = on_paper(plan), Rate(0.0, 0.1)
    swap = least_swap(kept, UnitBytes.equal(plan.shape), slow, [3, 3])
    assert swap.fits
    check(add_swap(plan, swap), swap=swap)
    swapped = on_paper(add_swap(plan, swap), swap, slow)
    assert swapped.makespan > kept.makespan
    assert sum(swapped.swap_waited) > 0


def forced_one_by_one(units: RankUnits, windows: dict[Unit, Window], budget: float) -> dict[Unit, Window]:
    """What `force` says, looking at every unit and counting every byte anew for each that goes."""
    windows = dict(windows)

    def wait(unit: Unit, now: int) -> float:
        out, back = units.ends[units.forward[unit]] + units.copy(unit), units.begins[now + 1] + units.copy(unit)
        return max(0.0, out - units.begins[now]) + max(0.0, back - units.begins[units.backward[unit]])

    def can_go(unit: Unit, now: int) -> bool:
        away = windows.get(unit, Window(0, 0))
        in_flight = units.forward[unit] < now < units.backward[unit]
        return in_flight and not away.vacate <= now < away.reload and units.moved(unit) > 0

    for now in range(len(units.begins)):
        while units.held(windows)[now] > budget:
            here = [unit for unit in units.forward if can_go(unit, now)]
            if not here:
                break
            unit = min(here, key=lambda unit: (wait(unit, now), -units.backward[unit]))
            before = windows.get(unit, Window(now, now))
            windows[unit] = Window(min(before.vacate, now), max(before.reload, now + 1))
    return windows


@settings(max_examples=150)
@example(Shape(1, 2, 7, 1), (1, 2), Rate(0.0, 1.0), 0.0, 0.75, 467)  # the last that goes was leaving anyway
@given(
    SHAPES,
    st.sampled_from([(1,), (1, 2), (5, 0, 3)]),
    st.builds(Rate, st.sampled_from([0.0, 0.1]), st.sampled_from([0.2, 0.5, 1.0, 3.0, 20.0])),
    st.sampled_from([0.0, 0.7]),
    st.floats(-0.1, 1.0),
    st.integers(0, 2**16),
)
def test_units_are_forced_one_by_one_those_first_that_are_waited_for_least(
    shape: Shape, weights: tuple[int, ...], link: Rate, attention: float, part: float, seed: int
) -> None:
    """In reach or not, beside some that leave and come back in time."""
    chance = Random(seed)
    timeline = on_paper(build("slimpipe", shape), costs=sliced_costs(shape.n, attention))
    for rank in range(shape.p):
        units = RankUnits.of(timeline, sizes_of(shape, weights), link, rank)
        some = [unit for unit in units.alone if chance.random() < 0.5]
        windows = {unit: window for unit, window in units.windows(some).items() if not window.empty}
        budget = part * max(units.held({}))
        assert force(units, windows, budget) == forced_one_by_one(units, windows, budget)


@pytest.mark.parametrize("budget", [0.5, 50.0])
def test_a_thousand_units_in_flight_are_not_looked_at_again_for_every_compute(budget: float) -> None:
    """Out of reach, and in reach of a link that is far too slow: 0.1 s of CPU each, and 4 to 10 when they were."""
    plan = build("slimpipe", Shape(1, 8, 128, 2))
    timeline = on_paper(plan, costs=sliced_costs(128, 0.7))
    units = RankUnits.of(timeline, UnitBytes.equal(plan.shape), Rate(0.0, 0.2), 0)
    began = time.process_time()
    windows = force(units, {}, budget)
    assert time.process_time() - began < 2
    assert (max(units.held(windows)) <= budget) == (budget > 1)


def test_what_can_be_done_is_done_where_the_budget_is_out_of_reach() -> None:
    plan = build("slimpipe", Shape(2, 1, 4, 2))
    swap = least_swap(on_paper(plan), UnitBytes.equal(plan.shape), FREE, [0.5, 0.5])
    assert not swap.fits
    assert (swap.budget, swap.wanted) == ((1.0, 1.0), (0.5, 0.5))
    check(add_swap(plan, swap), swap=swap)


# ---- where it goes ----


def test_actions_of_a_lowered_plan() -> None:
    """Behind the unit's send, before the compute action that is named, what is needed first first."""
    plan = lower(build("slimpipe", Shape(2, 1, 2, 2)), lookahead=0)
    trips = ((Trip(Unit(0, 0, 0), 2, 4), Trip(Unit(0, 1, 0), 2, 4)), ())
    swap = Swap(UnitBytes.equal(plan.shape), trips, (9, 9), (9, 9))
    swapped = add_swap(plan, swap)
    assert [str(action) for action in swapped.ranks[0]][:16] == [
        *("F0.0@0", "SF0.0@0>1", "O0.0@0", "F0.1@0", "SF0.1@0>1", "O0.1@0"),
        *("V0.0@0", "V0.1@0", "F1.0@0", "SF1.0@0>1", "F1.1@0", "SF1.1@0>1", "RB0.1@0<1"),
        *("R0.1@0", "R0.0@0", "B0.1@0"),
    ]
    assert swapped.ranks[1] == plan.ranks[1]
    check(swapped, swap=swap)
    assert replay_in_order(swapped) == replay_in_order(plan)
    assert from_csv(to_csv(swapped)) == swapped
    with pytest.raises(PlanError, match="has swaps already"):
        add_swap(swapped, swap)


def test_with_loans_and_vocabulary_passes() -> None:
    shape = Shape(4, 2, 8, 3)
    plan = build("slimpipe", shape)
    exchange = balance(plan, "balanced", sliced_work(8, 0.6, 512), 128, 512)
    plan = add_exchange(plan, exchange)
    plan = lower(add_vocabulary(plan, None, exchange.slots), 0)
    bare = build("slimpipe", shape)
    for swap in (
        least_swap(on_paper(bare), UnitBytes.equal(shape), Rate(0.0, 1.0), [8] * 4),
        share_swap(on_paper(bare), UnitBytes.equal(shape), Rate(0.0, 1.0), 1.0),
    ):
        check(add_swap(plan, swap), exchange, swap=swap)
        replay_in_order(add_swap(plan, swap), exchange=exchange, send_window=3)


def test_an_evaluation_has_nothing_to_swap() -> None:
    plan = forward_only(build("slimpipe", Shape(2, 1, 4, 1)))
    swap = Swap(UnitBytes.equal(plan.shape), ((Trip(Unit(0, 0, 0), 2, 3),), ()), (9, 9), (9, 9))
    with pytest.raises(PlanError, match=r"rank 0 has no backward of 0\.0@0"):
        add_swap(plan, swap)


@pytest.mark.parametrize(
    ("trips", "words"),
    [
        ([(0, 5)], "0.0@0 cannot be away from 0 to 5: its forward is the rank's compute action 0, its backward 11"),
        ([(4, 3)], "cannot be away from 4 to 3"),
        ([(1, 12)], "cannot be away from 1 to 12"),
        ([(99, 100)], "cannot be away from 99 to 100"),
        ([(1, 3), (4, 5)], "two trips of one unit"),
    ],
)
def test_trips_that_cannot_be_made(trips: list[tuple[int, int]], words: str) -> None:
    plan = build("slimpipe", Shape(2, 1, 4, 2))
    made = tuple(Trip(Unit(0, 0, 0), *trip) for trip in trips)
    with pytest.raises(PlanError, match=words):
        add_swap(plan, Swap(UnitBytes.equal(plan.shape), (made, ()), (9, 9), (9, 9)))


def test_a_swap_of_another_plan() -> None:
    plan, swap = build("slimpipe", Shape(2, 1, 4, 2)), swapped_plan()[1]
    with pytest.raises(PlanError, match="made for 1 ranks, and p = 2"):
        add_swap(plan, replace(swap, trips=swap.trips[:1]))
    for shape, words in ((Shape(1, 1, 4, 2), "made for 1 ranks"), (Shape(2, 2, 4, 2), "not made for v = 1")):
        with pytest.raises(PlanError, match=words):
            check(swapped_plan()[0], swap=replace(swap, bytes=UnitBytes.equal(shape)))


# ---- what the checker refuses ----


def swapped_plan() -> tuple[Plan, Swap]:
    plan = build("slimpipe", Shape(2, 1, 4, 2))
    swap = least_swap(on_paper(plan), UnitBytes.equal(plan.shape), FREE, [3, 3])
    return add_swap(plan, swap), swap


def with_rank(plan: Plan, rank: int, actions: list[Action]) -> Plan:
    return replace(plan, ranks=tuple(tuple(actions) if r == rank else a for r, a in enumerate(plan.ranks)))


@pytest.mark.parametrize("op", [Op.OFFLOAD, Op.VACATE, Op.RELOAD])
def test_every_action_left_out_given_twice_or_moved_is_refused(op: Op) -> None:
    plan, swap = swapped_plan()
    for rank, actions in enumerate(plan.ranks):
        for at, action in enumerate(actions):
            if action.op is not op:
                continue
            without = [*actions[:at], *actions[at + 1 :]]
            for broken in (
                without,
                [*actions[: at + 1], action, *actions[at + 1 :]],
                [action, *without],
                [*without, action],
            ):
                with pytest.raises(PlanError, match=f"rank {rank}, action"):
                    check(with_rank(plan, rank, broken), swap=swap)


def test_what_the_swap_does_not_say_is_refused() -> None:
    plan, swap = swapped_plan()
    kept = replace(swap, trips=(swap.trips[0][1:], swap.trips[1]))
    with pytest.raises(PlanError, match="the swap keeps 0.0@0 on the device"):
        check(plan, swap=kept)
    bare = build("slimpipe", plan.shape)
    with pytest.raises(PlanError, match="O0.0@0 is missing"):
        check(bare, swap=swap)
    with pytest.raises(PlanError, match="units in flight hold 3 bytes, above the 2 that the swap states"):
        check(plan, swap=replace(swap, budget=(2, 3)))
    with pytest.raises(PlanError, match="above the nan"):
        check(plan, swap=replace(swap, budget=(float("nan"), 3)))
    with pytest.raises(PlanError, match="made for 1 ranks"):
        check(plan, swap=replace(swap, trips=swap.trips[:1]))
    with pytest.raises(PlanError, match="0 <= movable <= held"):
        UnitBytes(((1,),), ((2,),))


def test_a_later_return_is_refused_as_too_late_and_an_earlier_one_as_too_much() -> None:
    plan, swap = swapped_plan()
    actions = list(plan.ranks[0])
    at = next(i for i, action in enumerate(actions) if action.op is Op.RELOAD)
    reload = actions.pop(at)
    backward = actions.index(Action(Op.BACKWARD, reload.unit))
    with pytest.raises(PlanError, match="expected R.* before it: its activations are away"):
        check(with_rank(plan, 0, [*actions[: backward + 1], reload, *actions[backward + 1 :]]), swap=swap)
    vacated = actions.index(Action(Op.VACATE, reload.unit))
    with pytest.raises(PlanError, match="above the 3 that the swap states"):
        check(with_rank(plan, 0, [*actions[: vacated + 1], reload, *actions[vacated + 1 :]]), swap=swap)


# ---- what it takes ----


def test_both_directions_are_charged_by_hand() -> None:
    """p = 1, n = 3, forwards 1 and backwards 2: F0 F1 F2 B2 B1 B0; slice 0's copies take 2.5 each way.

    Out 1 to 3.5; V before F2 holds compute from 2 to 3.5; F2 to 4.5, B2 to 6.5; R before B1, back 6.5 to 9; B1 to 8.5;
    B0 waits from 8.5 to 9 and ends at 11.
    """
    plan = build("slimpipe", Shape(1, 1, 3, 1))
    swap = Swap(UnitBytes.equal(plan.shape), ((Trip(Unit(0, 0, 0), 2, 4),),), (3,), (3,))
    timeline = on_paper(add_swap(plan, swap), swap, Rate(0.5, 0.5))
    assert [(copy.inward, copy.start, copy.end) for copy in timeline.copies] == [(False, 1.0, 3.5), (True, 6.5, 9.0)]
    assert timeline.makespan == 11.0
    assert timeline.swap_waited == (2.0,)
    assert timeline.idle == (2.0,)
    assert on_paper(add_swap(plan, swap)).makespan == 9.0
    held = held_by_units(add_swap(plan, swap).ranks[0], (1,), (1,))
    assert [now.device for now in held] == [1, 1, 2, 1, 2, 2, 2, 2, 1]
    assert [now.host for now in held] == [0, 1, 1, 1, 1, 1, 1, 1, 1]


def test_copies_of_a_direction_queue_and_directions_do_not() -> None:
    plan = build("slimpipe", Shape(1, 1, 4, 1))
    trips = (Trip(Unit(0, 0, 0), 3, 5), Trip(Unit(0, 1, 0), 3, 5))
    swap = Swap(UnitBytes.equal(plan.shape), (trips,), (4,), (4,))
    timeline = on_paper(add_swap(plan, swap), swap, Rate(0.0, 0.5))
    out = [(copy.start, copy.end) for copy in timeline.copies if not copy.inward]
    back = [(copy.start, copy.end) for copy in timeline.copies if copy.inward]
    assert out == [(1.0, 3.0), (3.0, 5.0)]
    assert back == [(8.0, 10.0), (10.0, 12.0)]


def test_pictures_show_both_ways() -> None:
    plan, swap = swapped_plan()
    text = grid(plan)
    assert text.splitlines()[2].startswith("  out")
    assert "O0.0" in text.splitlines()[2]
    assert "R0.0" in text.splitlines()[3]
    svg = draw_svg(on_paper(plan, swap, Rate(0.0, 1.0)))
    assert "to host" in svg
    assert "back</text>" in svg
    assert "to host" not in draw_svg(on_paper(build("slimpipe", plan.shape)))
