"""Swap in the pipeline on GPUs, of activations and of keys and values: the bits of a run without it under deterministic
kernels, memory as predicted, and no wait left out where copies are made slow.

One GPU runs the layouts of one rank; two also the pipeline over NCCL.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from slimpipe.config import Config
from slimpipe.parallel.mesh import prepare_process
from slimpipe.runtime.carrier import Carrier
from slimpipe.schedule import Op, held_by_units
from slimpipe.swap.cuda_streams import CudaStreams
from slimpipe.train.session import Session
from tests.gpu.test_gradients import LENGTH, SPEC, batch, errors, run_each, settings
from tests.support.reference import relative_error

pytestmark = pytest.mark.gpu
MODES = ("none", "norms", "mlp", "all_but_attention", "full")


def with_swap(config: Config, swap: float | str = 1.0, **memory: Any) -> Config:
    values = config.model_dump(mode="python")
    values["memory"] = {"recompute": config.memory.recompute, "swap": swap, **memory}
    return Config.from_dict(
        {key: {k: v for k, v in section.items() if v is not None} for key, section in values.items()}
    )


def made(config: Config) -> Session:
    prepare_process(config)
    return Session(config, Carrier(torch.device("cuda", 0)))


def step(session: Session) -> tuple[float, dict[str, Tensor]]:
    loss = session.step_gradients(*batch())
    return loss, {name: gradient.cpu() for name, gradient in session.gradients().items()}


def emptied() -> None:
    """An engine is in a cycle with its table of actions, and weights and gradients with it."""
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _no_global_switches() -> Iterator[None]:
    """`train.deterministic` sets torch's switch for the process."""
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


def assert_bitwise(config: Config, swap: float | str = 1.0, **memory: Any) -> Session:
    loss, gradients = step(made(config))
    torch.cuda.empty_cache()
    session = made(with_swap(config, swap, **memory))
    assert session.swaps is not None
    for _ in range(2):
        found = step(session)
        assert found[0] == loss
        different = [name for name, gradient in found[1].items() if not torch.equal(gradient, gradients[name])]
        assert different == []
        assert session.swaps.moved_out == session.swaps.moved_in > 0
        assert session.swaps.kept == session.swaps.counts.late_fetches == 0
        assert session.swaps.arenas.in_use == session.swaps.away_bytes == 0
    return session


@pytest.mark.parametrize("mode", MODES)
def test_bitwise(mode: str) -> None:
    """Slices of 1024 tokens: hidden states of 2 MiB move, statistics and rotary tables stay."""
    assert_bitwise(settings(1, 1, 8, recompute=mode, deterministic=True))


def test_bitwise_with_several_chunks() -> None:
    assert_bitwise(settings(1, 2, 8, recompute="norms", deterministic=True), 0.7)


@contextmanager
def slow_copies(cycles: int) -> Iterator[None]:
    """Each copy begins after the copy stream was kept busy: what does not wait for it reads something else."""
    original = CudaStreams._copy

    def copy(self: CudaStreams, stream: torch.cuda.Stream, *arguments: Any) -> torch.cuda.Event:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
        return original(self, stream, *arguments)

    with mock.patch.object(CudaStreams, "_copy", copy):
        yield


def test_bitwise_with_slow_copies() -> None:
    config = settings(1, 1, 8, recompute="mlp", deterministic=True)
    with slow_copies(2_000_000):  # about a millisecond a tensor
        session = assert_bitwise(config)
        metrics = session.train_step(*batch())
    assert metrics.swap is not None
    assert metrics.swap.exposed_s > 0


def test_slow_copies_would_show() -> None:
    """Compute that does not wait for copies back: what the test above would see."""
    config = settings(1, 1, 8, recompute="mlp", deterministic=True)
    loss, gradients = step(made(config))
    session = made(with_swap(config))
    with slow_copies(2_000_000), mock.patch.object(CudaStreams, "wait", lambda self, event: None):
        found = step(session)
    torch.cuda.synchronize()
    assert found[0] == loss  # the forward needs nothing back
    assert any(not torch.equal(gradient, gradients[name]) for name, gradient in found[1].items())


@pytest.mark.parametrize("mode", ["norms", "all_but_attention"])
def test_memory_saved_is_what_was_predicted(mode: str) -> None:
    """A step's peak falls by what the forecast says with and without swap, to 3 % below and 6 % above.

    What the model's end keeps of a unit (the final norm's input, the output's gradient) goes too, and is predicted to
    stay.
    """
    config = settings(1, 1, 8, recompute=mode)
    peaks, predicted = [], []
    for settings_ in (config, with_swap(config, 1.0)):
        session = made(settings_)
        session.train_step(*batch())
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        session.train_step(*batch())
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
        predicted.append(session.footprint.terms["activations"])
        if session.swaps is not None:
            actions = session.engine.actions
            moving = {action.unit for action in actions if action.op is Op.OFFLOAD}
            moved = [action for action in actions if action.unit in moving]
            host = max(now.host for now in held_by_units(moved, session.swap_bytes, session.swap_bytes))
            assert host <= session.swaps.arenas.pinned <= 1.3 * host + 2 * 2**30
        del session
        emptied()
    saved, expected = peaks[0] - peaks[1], predicted[0] - predicted[1]
    print(f"\n{mode}: saved {saved / 2**20:.1f} MiB, predicted {expected / 2**20:.1f}; peaks {peaks}")
    assert expected > 0
    end = 2 * 8 * LENGTH // 8 * SPEC.hidden * 2
    assert 0.97 * expected - (8 << 20) <= saved <= 1.06 * expected + end + (8 << 20)


def test_auto_within_a_budget() -> None:
    config = settings(1, 1, 8, recompute="norms")
    plain = made(config)
    plain.train_step(*batch())
    terms, total = plain.footprint.terms, plain.footprint.total
    del plain
    emptied()
    budget = (total - 0.4 * terms["activations"]) / 2**30
    session = made(with_swap(config, "auto", gpu_budget_gib=budget))
    session.train_step(*batch())
    torch.cuda.reset_peak_memory_stats()
    metrics = session.train_step(*batch())
    assert metrics.swap is not None
    assert 0 < metrics.swap.out_bytes[0] < 2 * 8 * session.swap_bytes[0]
    print(f"\nbudget {budget:.3f} GiB, peak {torch.cuda.max_memory_allocated() / 2**30:.3f}; {metrics.swap}")
    assert torch.cuda.max_memory_allocated() <= budget * 2**30 * 1.03


# A setting's swaps beside none, all in one job: of activations, of keys and values, of both.
OVER_NCCL: list[tuple[int, bool, str, str]] = [
    (1, False, "off", "norms"),
    (2, True, "off", "all_but_attention"),
    (1, True, "balanced", "full"),
]


@pytest.mark.parametrize(("v", "vocab", "exchange", "recompute"), OVER_NCCL)
def test_over_nccl(v: int, vocab: bool, exchange: str, recompute: str, tmp_path: Path) -> None:
    """Two ranks. The order of NCCL's sums may differ from run to run: gradients to rounding of bf16."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, here {torch.cuda.device_count()}")
    config = settings(2, v, 8, vocab, recompute=recompute, exchange=exchange, deterministic=True)
    swaps = [with_swap(config), with_swap(config, "off", kv_swap="on"), with_swap(config, kv_swap="on")]
    plain, *others = run_each([config, *swaps], tmp_path)
    for moved, found in zip(("units", "keys", "units and keys"), others, strict=True):
        together, _ = errors(found["gradients"], plain["gradients"])
        print(f"\nv={v} vocab={vocab} {exchange} {recompute}, {moved}: {found['loss']}, {together:.2e}")
        assert relative_error(torch.tensor(found["loss"]), torch.tensor(plain["loss"])) <= 1e-5
        assert together <= 1e-3


# ---- keys and values, by layer ----


def assert_keys_bitwise(config: Config, swap: float | str = "off") -> Session:
    plain = made(config)
    loss, gradients = step(plain)
    losses = plain.token_losses(*batch())
    del plain
    emptied()
    session = made(with_swap(config, swap, kv_swap="on"))
    keys, kv = session.slot_streams, session.planned.kv
    assert keys is not None and kv is not None
    for _ in range(2):
        found = step(session)
        assert found[0] == loss
        different = [name for name, gradient in found[1].items() if not torch.equal(gradient, gradients[name])]
        assert different == []
        assert (keys.moved_out, keys.moved_in) == kv.moved(session.plan, 0, session.engine.slots)
        assert torch.equal(session.token_losses(*batch()), losses)
        assert keys.moved_in > 0  # the evaluation's
    assert keys.arenas.in_use == session.planned.kv_bytes(0)
    return session


@pytest.mark.parametrize("mode", ["norms", "all_but_attention", "full"])
def test_keys_bitwise(mode: str) -> None:
    assert_keys_bitwise(settings(1, 1, 8, recompute=mode, deterministic=True))


def test_keys_bitwise_with_several_chunks_beside_units() -> None:
    session = assert_keys_bitwise(settings(1, 2, 8, recompute="mlp", deterministic=True), 0.7)
    assert session.swaps is not None and session.swaps.moved_out > 0


def test_keys_bitwise_with_slow_copies() -> None:
    config = settings(1, 1, 8, recompute="norms", deterministic=True)
    with slow_copies(500_000):
        session = assert_keys_bitwise(config)
        metrics = session.train_step(*batch())
    assert metrics.swap is not None
    assert metrics.swap.exposed_kv_s > 0


def test_slow_copies_of_keys_would_show() -> None:
    config = settings(1, 1, 8, recompute="norms", deterministic=True)
    loss, _ = step(made(config))
    session = made(with_swap(config, "off", kv_swap="on"))
    # Ten milliseconds each: the host takes some for a layer as small as this one, and a copy of one was in time.
    with slow_copies(20_000_000), mock.patch.object(CudaStreams, "wait", lambda self, event: None):
        found = step(session)
    torch.cuda.synchronize()
    assert found[0] != loss


def test_memory_of_keys_is_what_was_predicted() -> None:
    """Between steps to the byte, and at the peak, which what a backward needs beside them is the same of."""
    config = settings(1, 1, 8, recompute="all_but_attention")
    held, peaks, predicted = [], [], []
    for settings_ in (config, with_swap(config, "off", kv_swap="on")):
        emptied()
        before = torch.cuda.memory_allocated()
        session = made(settings_)
        session.train_step(*batch())
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held.append(torch.cuda.memory_allocated() - before)
        session.train_step(*batch())
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        predicted.append(session.footprint.terms["KV slots"] + session.footprint.terms["dK, dV"])
        if session.slot_streams is not None:
            assert session.slot_streams.device_bytes == predicted[-1]
            pinned, need = session.slot_streams.arenas.pinned, session.planned.kv_bytes(0)
            assert need <= pinned <= need + 2**30
        del session
    print(f"\nheld {held}, peaks {peaks}, predicted {predicted}")
    expected = predicted[0] - predicted[1]
    assert expected > 32 << 20
    assert abs(held[0] - held[1] - expected) <= 1 << 20
    assert abs(peaks[0] - peaks[1] - expected) <= 8 << 20
