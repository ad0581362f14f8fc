"""Swap in the pipeline: every number is, bit for bit, what it is without; on streams whose copies come as late as they
may, or in odd orders, with memory poisoned that was given up too early."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from torch import Tensor

from slimpipe.config import ConfigError
from slimpipe.runtime.swap_memory import HostMemoryError, HostNeed, pin
from slimpipe.schedule import Op, held_by_units
from slimpipe.swap import SimulatedStreams
from slimpipe.train.forecast import Forecast
from slimpipe.train.planning import make_plan
from slimpipe.train.session import Session
from slimpipe.train.swapping import plan_swaps
from tests.numerics.harness import batch_of, case, config_of, copies
from tests.support.cover import Case
from tests.support.pool import Pool

Amount = Literal["auto"] | float
GIB = 2**30
CPU = torch.device("cpu")


def memory(layout: Case, amount: Amount) -> dict[str, Any]:
    """`auto`: with a budget that two thirds of the activations that can move find room in."""
    if amount != "auto":
        return {"recompute": layout.recompute, "swap": amount}
    plain = config_of(layout)
    everything = plan_swaps(config_of(layout, memory={"swap": 1.0}), make_plan(plain), CPU)
    assert everything.swap is not None
    kept = max(Forecast(plain, make_plan(plain), CPU).memory, key=lambda found: found.total)
    lowered = Forecast(plain, everything, CPU).memory
    room = kept.terms["activations"] - max(found.terms["activations"] for found in lowered)
    budget = kept.total - room / 3
    return {"recompute": layout.recompute, "swap": "auto", "gpu_budget_gib": budget / GIB}


def numbers(session: Session, layout: Case) -> list[Tensor]:
    """Loss, gradient norm and weights of a training step, the losses of an evaluation after it, and loss and gradients
    of a second step. Three walks of the plan: a fourth meets nothing that the second step has not met."""
    step = session.train_step(*batch_of(layout))
    found = [torch.tensor((step.loss, step.grad_norm)), *copies(session.weights()).values()]
    found.append(session.token_losses(*batch_of(layout)))
    found.append(torch.tensor(session.step_gradients(*batch_of(layout))))
    return found + list(copies(session.gradients()).values())


def compare(rank: int, world: int, layout: Case, amount: Amount, order: Any) -> dict[str, Any]:
    """On a rank: the same with and without swap."""
    expected = numbers(Session(config_of(layout)), layout)
    streams = SimulatedStreams(order=order, seed=rank)
    session = Session(config_of(layout, memory=memory(layout, amount)), streams=streams)
    found = numbers(session, layout)
    assert len(found) == len(expected)
    swaps = session.swaps
    measured = sum(
        session.swap_bytes[action.unit.chunk] for action in session.engine.actions if action.op is Op.OFFLOAD
    )
    return {
        "measured": measured,
        "different": [i for i, pair in enumerate(zip(found, expected, strict=True)) if not torch.equal(*pair)],
        "faults": streams.faults,
        "moved": (0, 0) if swaps is None else (swaps.moved_out, swaps.moved_in),
        "left": 0 if swaps is None else swaps.arenas.in_use + swaps.live() + swaps.away_bytes,
        "late": 0 if swaps is None else swaps.counts.late_fetches,
        "kept": 0 if swaps is None else swaps.kept,
    }


def assert_same(reports: Sequence[dict[str, Any]]) -> None:
    for report in reports:
        assert report["different"] == report["faults"] == []
        # What was measured for a unit, its input from another rank too.
        assert report["moved"] == (report["measured"],) * 2
        assert report["left"] == report["late"] == report["kept"] == 0
    assert max(report["moved"][0] for report in reports) > 0


LAYOUTS = [
    (case(n=4, m=1), 1.0, "late"),
    (case(n=4, m=2, v=2, recompute="norms"), "auto", "random"),
    (case(pp=2, n=1, m=3, schedule="1f1b", recompute="mlp"), 1.0, "late"),
    (case(pp=2, n=4, m=1, recompute="mlp"), 1.0, "late"),
    (case(pp=2, n=4, m=2, recompute="full", vocab_parallel=True), "auto", "random"),
    (case(pp=2, n=4, m=3, v=2, recompute="all_but_attention", vocab_parallel=True, tied=True), 0.7, "late"),
    (case(pp=2, n=4, m=2, tied=True, qk_norm=True, mask="ragged", micro_batch=2), 1.0, "random"),
    (case(pp=2, n=8, m=2, exchange="balanced", granule=2, vocab_parallel=True), 1.0, "late"),
    (case(pp=2, n=4, m=2, layers="uneven", recompute="norms"), "auto", "late"),
    (case(pp=3, n=4, m=2, recompute="none", vocab_parallel=True), 0.5, "random"),
    (case(pp=3, n=4, m=2, v=2, exchange="balanced", granule=4, recompute="full", vocab_parallel=True), 1.0, "late"),
    (case(pp=4, n=8, m=1, exchange="balanced", granule=2, keep="kv", vocab_parallel=True), "auto", "random"),
    (case(pp=4, n=4, m=3, v=2, recompute="mlp"), 1.0, "early"),
]


@pytest.mark.parametrize(("layout", "amount", "order"), LAYOUTS, ids=lambda value: str(value).replace(" ", ""))
def test_bitwise(layout: Case, amount: Amount, order: str, pool: Callable[[int], Pool]) -> None:
    assert_same(pool(layout.pp).run(compare, layout, amount, order))


# ---- a wait that is left out shows ----

LAYOUT = case(n=4, m=2)


def no_wait() -> AbstractContextManager[Any]:
    return mock.patch.object(SimulatedStreams, "wait", lambda self, event: None)


def no_wait_before_memory_is_free() -> AbstractContextManager[Any]:
    return mock.patch.object(SimulatedStreams, "wait_everywhere", lambda self, event: None)


def copies_back_do_not_wait_for_copies_out() -> AbstractContextManager[Any]:
    original = SimulatedStreams.copy_in

    def copy_in(self: SimulatedStreams, host: Tensor, target: Tensor, after: Any) -> Any:
        return original(self, host, target, [])

    # The wait at V has the copies out happen before: it is left out as well.
    return _both(
        mock.patch.object(SimulatedStreams, "copy_in", copy_in),
        mock.patch.object(SimulatedStreams, "wait_everywhere", lambda self, event: None),
    )


def host_memory_is_written_while_it_is_read() -> AbstractContextManager[Any]:
    """Slots are given back as soon as their copy back was started."""
    original = SimulatedStreams.copy_in

    def copy_in(self: SimulatedStreams, host: Tensor, target: Tensor, after: Any) -> Any:
        event = original(self, host, target, after)
        host.fill_(0xFF)
        return event

    return mock.patch.object(SimulatedStreams, "copy_in", copy_in)


def _both(*patches: Any) -> AbstractContextManager[Any]:
    stack = ExitStack()
    for patch in patches:
        stack.enter_context(patch)
    return stack


BROKEN = (
    no_wait,
    no_wait_before_memory_is_free,
    copies_back_do_not_wait_for_copies_out,
    host_memory_is_written_while_it_is_read,
)


@pytest.mark.parametrize("broken", [None, *BROKEN], ids=lambda broken: "sound" if broken is None else broken.__name__)
def test_a_wait_left_out_gives_wrong_numbers(broken: Callable[[], AbstractContextManager[Any]] | None) -> None:
    plain = Session(config_of(LAYOUT))
    expected = plain.step_gradients(*batch_of(LAYOUT)), copies(plain.gradients())
    streams = SimulatedStreams(order="late")
    session = Session(config_of(LAYOUT, memory={"swap": 1.0}), streams=streams)
    with nullcontext() if broken is None else broken():
        loss = session.step_gradients(*batch_of(LAYOUT))
    found = session.gradients()
    same = loss == expected[0] and all(torch.equal(found[name], value) for name, value in expected[1].items())
    assert (same and not streams.faults) == (broken is None)


# ---- memory ----


@pytest.mark.parametrize("recompute", ["none", "all_but_attention", "full"])
def test_the_device_holds_what_the_plan_says(recompute: str) -> None:
    """Of the units that move, whose tensors the simulated device counts: at the peak all but what a backward, the
    largest action, has dropped on its way."""
    layout = case(n=8, m=2, recompute=recompute)
    streams = SimulatedStreams()
    session = Session(config_of(layout, memory={"recompute": recompute, "swap": 1.0}), streams=streams)
    moving = {action.unit for action in session.engine.actions if action.op is Op.OFFLOAD}
    actions = [action for action in session.engine.actions if action.unit in moving]
    planned = max(now.device for now in held_by_units(actions, session.swap_bytes, session.swap_bytes))
    streams.peak_memory(restart=True)
    session.step_gradients(*batch_of(layout))
    unit = session.swap_bytes[0]
    assert planned - unit < streams.peak_memory() <= planned < len(moving) / layout.m * unit
    host = max(now.host for now in held_by_units(actions, session.swap_bytes, session.swap_bytes))
    assert session.swaps is not None
    # Slots begin at multiples of 512 bytes.
    assert host <= session.swaps.arenas.peak <= host * 1.5
    assert session.swaps.arenas.pinned >= session.swaps.arenas.peak


def test_nothing_grows_from_step_to_step() -> None:
    session = Session(config_of(LAYOUT, memory={"swap": 1.0}))
    swaps = session.swaps
    assert swaps is not None
    seen = []
    for _ in range(4):
        session.train_step(*batch_of(LAYOUT))
        seen.append((swaps.arenas.pinned, swaps.arenas.peak, len(swaps._known), len(swaps._all), len(swaps._holders)))
        assert len(swaps.stalls) == 0
    assert seen[1:] == seen[:-1]


def test_prediction_of_a_unit_is_what_is_measured() -> None:
    """Llama's layers, less what the ends of the model add (final norm, gradient of its output, tokens)."""
    for recompute in ("none", "norms", "mlp", "all_but_attention", "full"):
        layout = case(pp=3, n=4, m=1, recompute=recompute)
        planned = plan_swaps(
            config_of(layout, memory={"recompute": recompute, "swap": 1.0}), make_plan(config_of(layout)), CPU
        )
        assert planned.swap is not None
        session = Session(config_of(layout, memory={"recompute": recompute, "swap": 1.0}), **alone(rank=1))
        assert session.swap_bytes == pytest.approx(planned.swap.bytes.movable[1], rel=1e-3)


def alone(rank: int) -> dict[str, Any]:
    """A middle rank by itself, up to its first step."""
    return {"transport": mock.Mock(), "rank": rank}


# ---- what is refused, and what is told ----


def test_no_pinned_memory_to_be_had() -> None:
    streams = SimulatedStreams(pinnable=1 << 12)
    with pytest.raises(ValueError, match=r"memory\.swap = 1\.0, rank 0: .* no pinned host memory beyond .*; move less"):
        Session(config_of(LAYOUT, memory={"swap": 1.0}), streams=streams)


def test_less_host_memory_than_all_ranks_need() -> None:
    need = HostNeed((1 << 30,), ((1 << 30, 0, 4), (1 << 30, 2, 3), (1 << 30, 3, 5)), available=3 << 30)
    assert need.peak == 2 << 30
    engine = Session(config_of(LAYOUT)).engine
    pin(engine, need, together=3 << 30)
    with pytest.raises(HostMemoryError, match=r"2\.0 GiB of pinned .* 4\.0 GiB by all ranks .* 3\.0 GiB available"):
        pin(engine, need, together=4 << 30)


def test_budgets_that_cannot_be_kept() -> None:
    plan = make_plan(config_of(LAYOUT))
    with pytest.raises(ConfigError, match=r"memory\.gpu_budget_gib = 1e-06: on rank 0 weights, .*; set it above that"):
        plan_swaps(config_of(LAYOUT, memory={"swap": "auto", "gpu_budget_gib": 1e-6}), plan, CPU)
    with pytest.raises(ConfigError, match=r"memory\.host_budget_gib = 1e-06: rank 0 needs .* GiB of host memory"):
        plan_swaps(config_of(LAYOUT, memory={"swap": 0.5, "host_budget_gib": 1e-6}), plan, CPU)


def test_auto_moves_nothing_where_nothing_asks_for_it() -> None:
    """On a CPU without a budget, and within a budget that suffices."""
    plan = make_plan(config_of(LAYOUT))
    assert plan_swaps(config_of(LAYOUT, memory={"swap": "auto"}), plan, CPU) == plan
    roomy = plan_swaps(config_of(LAYOUT, memory={"swap": "auto", "gpu_budget_gib": 1.0}), plan, CPU)
    assert roomy.plan == plan.plan
    session = Session(config_of(LAYOUT, memory={"swap": "auto", "gpu_budget_gib": 1.0}))
    assert session.swaps is None
    metrics = session.train_step(*batch_of(LAYOUT))
    assert metrics.swap is not None and metrics.swap.out_bytes == (0,)


def test_metrics_say_what_moved_and_what_was_waited_for() -> None:
    session = Session(config_of(LAYOUT, memory={"swap": 1.0}))
    found = session.train_step(*batch_of(LAYOUT)).swap
    assert found is not None
    moved = sum(session.swap_bytes[action.unit.chunk] for action in session.engine.actions if action.op is Op.OFFLOAD)
    assert found.out_bytes == found.back_bytes == (moved,)
    assert found.kept_bytes == (0,) and found.pinned_bytes[0] > 0
    assert found.exposed_s == found.exposed_out_s + found.exposed_back_s > 0
