"""Runs a training program plainly and under a swap manager, and compares every number bit by bit."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from slimpipe.swap import SimulatedStreams, SwapManager, SwapSettings

Step = Callable[[], AbstractContextManager[None]]
Program = Callable[[Step], list[Tensor]]
"""Trains something, each step inside `with step():`, and returns every number that matters."""

STEPS = 7
"""Two warm-up steps, a profiled one, up to two trials, and two in the steady state."""


def make_manager(
    gpu_budget: int | None,
    streams: SimulatedStreams | None = None,
    host_budget: int = 8 << 20,
    **settings: Any,
) -> SwapManager:
    """A manager for small tensors, on simulated streams."""
    values: dict[str, Any] = {"min_bytes": 512, "arena_bytes": 1 << 16, "policies": 2, **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return SwapManager(
            gpu_budget, host_budget, settings=SwapSettings(**values), streams=streams or SimulatedStreams(rate=1e9)
        )


def run(program: Program, manager: SwapManager | None) -> list[Tensor]:
    torch.manual_seed(0)
    if manager is None:
        return program(contextlib.nullcontext)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="swap: ")
        return program(manager.step)


def differences(found: list[Tensor], expected: list[Tensor]) -> list[int]:
    """Places at which bits differ."""
    assert len(found) == len(expected)
    return [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if not _same_bits(a, b)]


def check_bitwise(program: Program, manager: SwapManager) -> SwapManager:
    """Everything equal, and nothing left behind."""
    expected = run(program, None)
    assert not any(tensor.isnan().any() for tensor in expected if tensor.is_floating_point())
    assert differences(run(program, manager), expected) == []
    check_clean(manager)
    return manager


def check_clean(manager: SwapManager) -> None:
    """Autograd has let everything go: nothing is on the host, under way or remembered."""
    manager.executor.drain()
    streams = manager.streams
    assert isinstance(streams, SimulatedStreams)
    assert streams.faults == []
    assert manager.executor.live() == 0
    assert manager.host_bytes_in_use == 0
    assert manager.executor.away_bytes == 0


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) if a.dim() else bool(a == b)
