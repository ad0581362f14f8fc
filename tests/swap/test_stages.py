"""The stage machine, alone and in training that changes under it."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from slimpipe.swap import SimulatedStreams, Stage, SwapManager
from slimpipe.swap.execution import ExecutionPlan, Times
from slimpipe.swap.features import Feature
from slimpipe.swap.logical_layers import estimate_error, estimated_seconds, logical_layers
from slimpipe.swap.signature import Segment, Signature, cosine, same_sequence
from slimpipe.swap.stages import StageMachine
from tests.swap.programs import batch, gradients, mlp
from tests.swap.support import differences, make_manager, run


def signature(kind: int = 0, tail: int = 50, operators: int = 400, saved: int = 1000) -> Signature:
    """Kinds use operators of their own."""
    numbers = np.arange(operators) % 10 + 10 * kind
    return Signature(Segment.of(numbers), Segment.of(numbers + 100), Segment.of(np.arange(tail) % 5), saved)


def plan(which: int) -> ExecutionPlan:
    return ExecutionPlan((Feature((which,), "float32", which, 0),), (0,), {0: Times(1, 2, 3)})


def machine(stable_steps: int = 2) -> StageMachine:
    return StageMachine(stable_steps, 0.05, 0.95)


def settle(stages: StageMachine, kind: Signature, plans: list[ExecutionPlan], seconds: list[float]) -> None:
    """Through warm-up, a profile, and the trials of its plans."""
    while not stages.orders().detailed:
        stages.saw(kind, 1.0, None, False)
    assert stages.profiled(kind)
    stages.made(kind, plans)
    if len(plans) > 1:
        for expected, time in zip(plans, seconds, strict=True):
            assert stages.trying() and stages.orders().plan is expected
            stages.saw(kind, time, expected, False)


def test_stages_in_order() -> None:
    stages, kind, plans = machine(3), signature(), [plan(1), plan(2), plan(3)]
    for _ in range(3):
        assert stages.stage is Stage.WARM_UP and not stages.orders().detailed
        stages.saw(kind, 1.0, None, False)
    assert stages.stage is Stage.GEN_POLICY and stages.orders().detailed
    assert stages.profiled(kind)
    stages.made(kind, plans)
    assert stages.stage is Stage.GEN_POLICY
    for expected, seconds in zip(plans, (3.0, 1.0, 2.0), strict=True):
        assert stages.orders().plan is expected
        stages.saw(kind, seconds, expected, False)
    assert stages.stage is Stage.STABLE and stages.orders().plan is plans[1]  # the fastest


def test_one_plan_needs_no_trial() -> None:
    stages = machine()
    settle(stages, signature(), [plan(1)], [])
    assert stages.stage is Stage.STABLE and not stages.trying()


def test_a_step_of_another_kind_during_the_trials_is_not_timed() -> None:
    stages, kind, plans = machine(), signature(), [plan(1), plan(2)]
    while not stages.orders().detailed:
        stages.saw(kind, 1.0, None, False)
    assert stages.profiled(kind)
    stages.made(kind, plans)
    stages.saw(kind, 5.0, plans[0], False)
    stages.saw(signature(1), 0.1, plans[1], False)
    assert stages.orders().plan is plans[1]
    stages.saw(kind, 9.0, plans[1], False)
    assert stages.orders().plan is plans[0]


def test_a_skipped_optimizer_step_is_no_change() -> None:
    stages = machine()
    settle(stages, signature(), [plan(1)], [])
    stages.saw(signature(tail=0), 1.0, plan(1), False)
    assert stages.stage is Stage.STABLE and stages.changes == 0


def test_validation_now_and_then_never_disturbs() -> None:
    """Also where it comes in the middle of the warm-up, or as often as training."""
    for pattern in ([0, 0, 0, 1], [0, 1], [0, 0, 1, 1]):
        stages, made = machine(), 0
        for i in range(40):
            kind = signature(pattern[i % len(pattern)])
            if stages.orders().detailed:
                if stages.profiled(kind):
                    made += 1
                    stages.made(kind, [plan(made)])
            else:
                stages.saw(kind, 1.0, None, False)
        assert made == 2 and len(stages.known) == 2 and stages.stage is Stage.STABLE


def test_a_sequence_that_returns_finds_its_plan() -> None:
    stages = machine()
    settle(stages, signature(0), [plan(1)], [])
    settle(stages, signature(1), [plan(2)], [])
    assert stages.orders().plan == plan(2)
    stages.saw(signature(0), 1.0, plan(2), False)
    stages.saw(signature(0), 1.0, plan(1), False)
    assert stages.orders().plan == plan(1) and len(stages.plans()) == 2


def test_what_comes_next_is_what_came_next_before() -> None:
    """Validation every fourth step: the step after it is expected to be a training step, and none is missed but it."""
    stages, wrong = machine(), []
    settle(stages, signature(0), [plan(1)], [])
    settle(stages, signature(1), [plan(2)], [])
    for i in range(40):
        kind = int(i % 4 == 3)
        if i > 12 and stages.orders().plan != plan(kind + 1):
            wrong.append(i % 4)
        stages.saw(signature(kind), 1.0, None, False)
    assert set(wrong) <= {3}


def test_a_single_stranger_makes_no_plan() -> None:
    stages = machine()
    settle(stages, signature(), [plan(1)], [])
    stages.saw(signature(7), 1.0, None, False)
    assert not stages.orders().detailed and stages.orders().plan == plan(1)


def test_a_rare_kind_does_not_keep_the_others_under_the_microscope() -> None:
    """A short batch every 37 steps is seldom caught; the looks for it get rarer."""
    stages, profiled = machine(), []
    for i in range(1500):
        kind = signature(int(i % 37 == 36))
        if stages.orders().detailed:
            profiled.append(i)
            if stages.profiled(kind):
                stages.made(kind, [plan(1 + int(i % 37 == 36))])
        else:
            stages.saw(kind, 1.0, None, False)
    assert len(profiled) <= 1 + 5 * 4 and len([i for i in profiled if i > 1000]) <= 4


def test_the_number_of_kinds_is_bounded() -> None:
    stages = StageMachine(1, 0.05, 0.95, sequences=4)
    for kind in range(40):
        settle(stages, signature(kind), [plan(kind)], [])
    assert len(stages.known) == 4
    for kind in range(100, 200):
        stages.saw(signature(kind), 1.0, None, False)
    assert len(stages._strangers) <= 4


def test_a_plan_that_no_longer_keeps_the_budget_is_made_anew() -> None:
    stages, kind = machine(), signature()
    settle(stages, kind, [plan(1)], [])
    steps = 0
    while not stages.orders().detailed:
        stages.saw(kind, 1.0, plan(1), True)
        steps += 1
        assert steps < 20
    assert steps > 2 and stages.profiled(kind)


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (signature(), True),
        (signature(operators=415), True),
        (signature(operators=440), False),
        (signature(tail=0), True),
        (signature(kind=1), False),
        (signature(saved=1040), True),
        (signature(saved=1100), False),
        (Signature.of([], 0), False),
    ],
)
def test_similarity(other: Signature, same: bool) -> None:
    assert same_sequence(signature(), other, 0.05, 0.95) is same
    assert same_sequence(other, signature(), 0.05, 0.95) is same


def test_segments_of_a_sequence() -> None:
    found = Signature.of([2, 4, 6, 3, 5, 4, 7, 8, 8], 10)  # 1 2 3 | 1 2 in the backward | 2 | 3 backward | 4 4
    assert (found.forward.length, found.backward.length, found.tail.length) == (4, 3, 2)
    assert list(found.forward.histogram) == [0, 1, 2, 1] and list(found.tail.histogram) == [0, 0, 0, 0, 2]
    assert Signature.of([2, 4], 0).forward.length == 2 and Signature.of([2, 4], 0).tail.length == 0


def test_cosine() -> None:
    zero = np.zeros(0, dtype=int)
    assert cosine(zero, zero) == 1.0 and cosine(zero, np.array([1])) == 0.0
    assert cosine(np.array([1, 0]), np.array([0, 0, 3])) == 0.0
    assert cosine(np.array([1, 1]), np.array([2, 2, 0])) == pytest.approx(1.0)
    assert cosine(np.array([1, 0]), np.array([1, 1])) == pytest.approx(1 / math.sqrt(2))


# In training


def following(manager: SwapManager, steps: int, loss_of: Callable[[nn.Module, int], Tensor]) -> list[int]:
    """Trains; bytes moved by plan in each step."""
    model, moved = mlp(), []
    for i in range(steps):
        before = manager.counts.planned_out
        with manager.step():
            loss_of(model, i).backward()
            for p in model.parameters():
                p.grad = None
        moved.append(manager.counts.planned_out - before)
    return moved


def test_training_with_validation_and_short_batches_keeps_its_plan() -> None:
    manager = make_manager(60_000, SimulatedStreams(rate=1e9))
    model = mlp()
    by_kind: dict[str, list[int]] = {"train": [], "validate": [], "short": []}
    for i in range(48):
        kind = "validate" if i % 4 == 2 else "short" if i % 12 == 11 else "train"
        before = manager.counts.planned_out
        with manager.step():
            if kind == "validate":
                model(batch(i)).square().mean()  # gradients on, no backward
            else:
                model(batch(i, 5 if kind == "short" else 16)).square().mean().backward()
        by_kind[kind].append(manager.counts.planned_out - before)
    assert all(moved > 0 for moved in by_kind["train"][-8:]), by_kind
    assert manager.streams.faults == []  # type: ignore[attr-defined]


def test_training_with_skipped_and_accumulated_steps_keeps_its_plan() -> None:
    manager = make_manager(60_000, SimulatedStreams(rate=1e9))
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    moved = []
    for i in range(40):
        before = manager.counts.planned_out
        with manager.step():
            model(batch(i)).square().mean().backward()
            if i % 4 == 3 and i % 3:
                optimizer.step()
                optimizer.zero_grad()
        moved.append(manager.counts.planned_out - before)
    # The first backward of an accumulation sets gradients, the others add to them: two kinds at most.
    assert len(manager.stages.known) <= 2 and all(moved[16:])


def test_a_branch_that_flips_gets_a_plan_and_the_old_one_returns() -> None:
    def loss(m: nn.Module, i: int) -> Tensor:
        y = batch(i)
        for layer in m.children():
            y = layer(y)
            if 16 <= i < 34:
                y = (y.tanh() * y.sigmoid()).cos() * y.sin().exp()
        return y.square().mean()

    manager = make_manager(50_000, SimulatedStreams(rate=1e9))
    moved = following(manager, 50, loss)
    assert len(manager.stages.known) == 2
    assert all(moved[12:16]) and all(moved[28:34]) and all(moved[36:])
    # Back in the old sequence the old plan is followed from the second step on, without another profile.
    assert len(set(moved[36:])) == 1 and moved[40] == moved[14]


def test_it_stops_when_memory_suffices_again() -> None:
    """A smaller batch for good: a new kind of step, and a plan that moves nothing."""
    manager = make_manager(60_000, SimulatedStreams(rate=1e9))
    model = mlp()
    moved = []
    for i in range(40):
        before = manager.counts.moved_out
        with manager.step():
            model(batch(i, 16 if i < 15 else 4)).square().mean().backward()
        moved.append(manager.counts.moved_out - before)
    assert all(moved[8:15]) and not any(moved[30:])


def test_the_budget_is_kept_in_the_steady_state() -> None:
    streams = SimulatedStreams(rate=1e9)
    manager, model = make_manager(60_000, streams), mlp()
    for i in range(20):
        if i == 12:
            streams.peak_memory(restart=True)
        with manager.step():
            model(batch(i)).square().mean().backward()
    assert manager.policies[0].fits and streams.peak_memory() <= 60_000
    assert manager.counts.mismatches == 0


def test_what_the_plan_foresees_is_what_happens() -> None:
    """Peak memory and stalls of a step, as the policy's simulator says and as the simulated device measures."""
    streams = SimulatedStreams(rate=1e9)
    manager, model = make_manager(40_000, streams, policies=1), mlp()
    for i in range(12):
        with manager.step():
            if i == 11:
                streams.peak_memory(restart=True)
                stalled = streams.stalled
            model(batch(i)).square().mean().backward()
    (policy,) = manager.policies
    assert policy.moved_bytes > 0
    # The device frees what a node of the backward has read at its end, a little later than the curve thinks.
    assert streams.peak_memory() == pytest.approx(policy.peak, rel=0.15)
    assert streams.stalled - stalled <= policy.stalled + 1e-4


def test_views_of_one_storage_leave_together() -> None:
    """Three thirds of one block, each small enough for a copy of its own: the block is free when all have left."""

    class Thirds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.project = nn.LayerNorm(32), nn.Linear(32, 96)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.project(self.norm(x)).view(16, 3, 32).transpose(0, 1).contiguous().unbind(0)
            return x + (q * k).tanh() * v.sin()

    streams = SimulatedStreams(rate=1e9)
    manager, model = make_manager(40_000, streams), nn.Sequential(*(Thirds() for _ in range(6)))
    for i in range(14):
        if i == 12:
            streams.peak_memory(restart=True)
            counts = manager.counts.still_referenced
        with manager.step():
            model(batch(i)).square().mean().backward()
    (policy, *_) = manager.policies
    assert policy.fits and any(s.candidate.nbytes == 3 * 16 * 32 * 4 for s in policy.swaps)
    assert manager.counts.still_referenced == counts
    assert streams.peak_memory() <= 40_000


# Logical layers


def test_the_equal_time_estimate() -> None:
    """Exact where operators take equal times; the error reported where one of four layers takes half of the time."""
    operators = list(range(0, 401, 10))
    equal = logical_layers(operators, [0.01 * k for k in operators], 4)
    assert len(equal) == 4 and estimate_error(equal) == pytest.approx(0, abs=1e-9)
    assert [layer.end - layer.begin for layer in equal] == [100] * 4
    skewed = [0.01 * k for k in operators if k <= 300] + [3.0 + 0.03 * (k - 300) for k in operators if k > 300]
    heavy = logical_layers(operators, skewed, 4)
    assert [layer.measured for layer in heavy] == pytest.approx([1.0, 1.0, 1.0, 3.0])
    assert [layer.estimated for layer in heavy] == pytest.approx([1.5] * 4)
    assert estimate_error(heavy) == pytest.approx((0.5 * 3 + 0.5 * 3) / 6)
    assert estimated_seconds(operators, skewed)[-1] == pytest.approx(6.0)
    assert logical_layers([0], [0.0]) == () and logical_layers([3, 3], [0.0, 1.0]) == ()


def test_results_do_not_depend_on_the_stage() -> None:
    """The same numbers in every step of the way."""

    def program(step: Callable[[], object]) -> list[Tensor]:
        model, found = mlp(), []
        for _ in range(14):
            with step():  # type: ignore[attr-defined]
                loss = model(batch(3)).square().mean()
                loss.backward()
                found += [loss.detach().clone(), *gradients(model)]
                model.zero_grad()
        return found

    found = run(program, make_manager(30_000, SimulatedStreams(order="random", rate=1e9)))  # type: ignore[arg-type]
    size = len(found) // 14
    for i in range(14):
        assert differences(found[i * size : (i + 1) * size], found[:size]) == []
