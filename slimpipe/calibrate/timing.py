"""How long something takes, in a steady state."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

WARM_UP = 3


def seconds(work: Callable[[], object], device: torch.device, least: float) -> float:
    """Mean time of one call, over as many as take `least` seconds and no fewer than three, after a warm-up.

    A mean and not the best: a GPU that runs for long does not keep the clock of its first milliseconds.
    """
    for _ in range(WARM_UP):
        work()
    _wait(device)
    one = _timed(work, device, 1)
    calls = max(3, int(least / max(one, 1e-7)))
    return _timed(work, device, calls) / calls


def _timed(work: Callable[[], object], device: torch.device, calls: int) -> float:
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
    started = time.perf_counter()
    for _ in range(calls):
        work()
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
