"""The simulator against hand calculation, an independent fixed point, and its promises."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimpipe.schedule import (
    Action,
    Costs,
    Flow,
    LinkCost,
    Op,
    Plan,
    PlanError,
    Rule,
    Shape,
    Tensor,
    Timeline,
    Unit,
    build,
    equal_costs,
    lower,
    peak_units,
    simulate,
    sliced_costs,
)
from tests.schedule.shapes import Case, supported_cases


def starts(timeline: Timeline, rank: int) -> dict[str, float]:
    return {str(span.action): span.start for span in timeline.spans[rank]}


def test_by_hand() -> None:
    """1f1b, p = 2, m = 2, backward twice forward: 2 (1 + 2) + one (1 + 2) of bubble."""
    timeline = simulate(build("1f1b", Shape(p=2, m=2)), equal_costs())
    assert starts(timeline, 0) == {"F0.0@0": 0, "F1.0@0": 1, "B0.0@0": 4, "B1.0@0": 7}
    assert starts(timeline, 1) == {"F0.0@0": 1, "B0.0@0": 2, "F1.0@0": 4, "B1.0@0": 5}
    assert timeline.makespan == 9
    assert timeline.idle == (3, 3)
    assert timeline.bubble_fraction == pytest.approx(1 / 3)
    assert timeline.peak_units == (2, 1)
    assert timeline.peak_activation_by_rank == (1.0, 0.5)
    assert timeline.sent == {"F": 2, "B": 2}
    assert timeline.bytes_sent == {"F": 0, "B": 0}


def test_link_costs_by_hand() -> None:
    """Bandwidth 10, tensors of 20 bytes, latency 0.5: a tensor holds the link for 2 and arrives after 2.5. Rank 0 sends
    at 1 and at 2; the second waits for the link until 3."""
    plan = build("gpipe", Shape(p=2, m=2))
    for timed in (plan, lower(plan)):
        timeline = simulate(timed, equal_costs(), LinkCost(latency=0.5, bandwidth=10, tensor_bytes=20))
        assert starts(timeline, 1) == {"F0.0@0": 3.5, "F1.0@0": 5.5, "B0.0@0": 6.5, "B1.0@0": 8.5}
        assert starts(timeline, 0) == {"F0.0@0": 0, "F1.0@0": 1, "B0.0@0": 11.0, "B1.0@0": 13.0}
        assert timeline.bytes_sent == {"F": 40, "B": 40}
        assert [(t.start, t.end) for t in timeline.transfers if t.link.kind == "F"] == [(1, 3.5), (3, 5.5)]


def test_a_transfer_waits_for_its_receive() -> None:
    """Posted right before use (lookahead 0), so transfers lie open: rank 1 asks for microbatch 1 when B0 is done."""
    plan = build("1f1b", Shape(p=2, m=2))
    link = LinkCost(latency=0.0, bandwidth=1.0, tensor_bytes=1)
    early, late = simulate(lower(plan, 2), equal_costs(), link), simulate(lower(plan, 0), equal_costs(), link)
    assert starts(early, 1)["F1.0@0"] == 5
    assert starts(late, 1)["F1.0@0"] == 6


def fixed_point(plan: Plan, costs: Costs) -> list[dict[Action, float]]:
    """Ends of actions, by sweeping over all ranks until nothing changes: slow and plain."""
    ends: list[dict[Action, float]] = [{} for _ in plan.ranks]
    changed = True
    while changed:
        changed = False
        for rank, actions in enumerate(plan.ranks):
            now = 0.0
            for action in actions:
                made = plan.producer(rank, action)
                if made is not None:
                    now = max(now, ends[made[0]].get(Action(action.op, made[1]), 0.0))
                now += costs.of(plan.shape.stage(rank, action.unit.chunk), action)
                changed |= ends[rank].get(action) != now
                ends[rank][action] = now
    return ends


@given(supported_cases(), st.randoms(use_true_random=False))
def test_agrees_with_a_fixed_point_under_any_costs(case: Case, rng: random.Random) -> None:
    plan = build(*case)
    table = {
        (op, stage, unit): float(rng.randrange(1, 50))
        for op in (Op.FORWARD, Op.BACKWARD)
        for stage in range(plan.shape.stages)
        for unit in {action.unit for action in plan.ranks[0]}
        if unit.chunk == plan.shape.place(stage)[1]
    }
    costs = Costs(
        lambda stage, unit: table[Op.FORWARD, stage, unit], lambda stage, unit: table[Op.BACKWARD, stage, unit]
    )
    timeline = simulate(plan, costs)
    ends = fixed_point(plan, costs)
    for rank, spans in enumerate(timeline.spans):
        assert {span.action: span.end for span in spans} == ends[rank]
    assert simulate(lower(plan, 1000), costs).spans == timeline.spans


@given(supported_cases())
def test_free_transfers_change_nothing_and_are_all_counted(case: Case) -> None:
    """Receives two ahead lose no time where transfers take none."""
    plan = build(*case)
    bare, lowered = simulate(plan, equal_costs()), simulate(lower(plan), equal_costs())
    assert lowered.spans == bare.spans
    crossing = plan.shape.m * plan.shape.n * (plan.shape.stages - 1) if plan.shape.p > 1 else 0
    assert bare.sent == lowered.sent == {"F": crossing, "B": crossing}
    assert sorted(t.tensor for t in bare.transfers) == sorted(t.tensor for t in lowered.transfers)


@pytest.mark.parametrize("n", [1, 7, 32])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.8, 1.0])
def test_sliced_costs_average_out(n: int, share: float) -> None:
    costs = sliced_costs(n, share)
    units = [Unit(0, i, 0) for i in range(n)]
    assert sum(costs.forward(0, unit) for unit in units) / n == pytest.approx(1.0)
    assert sum(costs.backward(0, unit) for unit in units) / n == pytest.approx(2 * (1 - share) + 2.5 * share)
    if n > 1 and share:
        first, last = costs.forward(0, units[0]), costs.forward(0, units[-1])
        assert (last - (1 - share)) / (first - (1 - share) or 1) == pytest.approx(2 * n - 1)


def test_costs_refused() -> None:
    with pytest.raises(PlanError, match=r"attention_share = 1\.5"):
        sliced_costs(4, 1.5)
    with pytest.raises(PlanError, match="bandwidth > 0"):
        LinkCost(0.0, 0.0, 1)


def test_transfers_that_do_not_match_are_refused() -> None:
    plan = lower(build("gpipe", Shape(p=2, m=2)))
    receives = list(plan.ranks[1])
    receives[0], receives[1] = receives[1], receives[0]
    with pytest.raises(PlanError, match=r"link F 0>1: .* meets the receive of"):
        simulate(Plan(plan.name, plan.shape, (plan.ranks[0], tuple(receives))), equal_costs())


def test_a_tensor_made_twice_is_refused() -> None:
    """Rather than simulated into nonsense: the simulator expects a plan that has been checked."""
    plan = build("gpipe", Shape(p=2, m=1))
    with pytest.raises(PlanError, match="activation of microbatch 0, slice 0 out of stage 0: happened twice"):
        simulate(Plan(plan.name, plan.shape, (plan.ranks[0][:1] + plan.ranks[0], plan.ranks[1])), equal_costs())


@pytest.mark.parametrize(
    ("tokens", "units", "of_chunk_0"),
    [
        ("", 0, 0),
        ("F0.0@0 F0.1@0 F0.0@1 B0.0@1 B0.1@0 B0.0@0", 3, 2),
        ("F0.0@0 F1.0@0 F2.0@1 B0.0@0 B1.0@0 B2.0@1 F3.0@1 B3.0@1", 3, 2),
    ],
)
def test_peak_units(tokens: str, units: int, of_chunk_0: int) -> None:
    actions = [Action.parse(token) for token in tokens.split()]
    assert peak_units(actions) == units
    assert peak_units(actions, chunk=0) == of_chunk_0


class Barrier(Rule):
    """All ranks meet before backward: the way in which collectives and exchanges hold ranks together."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def arrive(self, flow: Flow, rank: int, action: Action, time: float) -> None:
        flow.post(("arrived", action, rank), time)

    def needs(self, flow: Flow, rank: int, action: Action) -> Sequence[object]:
        gradient = [Tensor("B", rank + 1, 0, 0)] if rank + 1 < self._ranks else []
        return [*(("arrived", action, other) for other in range(self._ranks)), *gradient]

    def run(self, flow: Flow, rank: int, action: Action, start: float) -> float:
        if rank > 0:
            flow.post(Tensor("B", rank, 0, 0), start + 1.0)
        return start + 1.0


def test_a_pass_can_bring_rules_of_its_own() -> None:
    plan = build("gpipe", Shape(p=3, m=1))
    timeline = simulate(plan, equal_costs(5.0), rules={Op.BACKWARD: Barrier(3)})
    assert [starts(timeline, rank)["B0.0@0"] for rank in range(3)] == [17, 16, 15]


def test_256_ranks_take_seconds() -> None:
    """131,072 actions; about a second on the machine that this was written on."""
    plan = build("slimpipe", Shape(p=256, n=64, m=4))
    begin = time.process_time()
    timeline = simulate(plan, sliced_costs(64, 0.8))
    assert time.process_time() - begin < 10
    assert sum(map(len, timeline.spans)) == 2 * 256 * 64 * 4
