"""Swap beside plain training under one cap on memory, and beside full recompute at one peak."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.swap_model import (
    GIB,
    Layer,
    Machine,
    Shape,
    hidden,
    layer_by_layer,
    longest,
    make,
    plain_bytes,
    recomputed,
    timed_steps,
)
from slimpipe.swap import SwapManager, SwapSettings

Step = Callable[[], AbstractContextManager[Any]]


def capped(
    machine: Machine, what: str, cap: int, layers: int, shape: Shape, host_budget: int, multiple: int
) -> dict[str, Any]:
    """Four times what fits under `cap` bytes without swap, as a sequence or as a batch.

    The longest sequence that fits is found by formula, with 5 % for the allocator's slack, and runs under the cap
    (`fits_peak_gib`). Four times of it plainly under the cap runs out of memory (`plain_capped`); with a swap manager
    whose budget is the cap it trains (`peak_gib`), and its step is compared with the plain one that has the whole
    device (`of_plain`).
    """
    size = machine.dtype.itemsize
    fits = longest(shape, layers, int(0.95 * cap), size, multiple)
    batch, tokens = (4, fits) if what == "batch" else (1, 4 * fits)
    model = make(machine, Layer, shape, layers)
    row: dict[str, Any] = {"case": f"capped-{what}", "layers": layers, "batch": batch, "tokens": tokens}
    row |= {"cap_gib": cap / GIB, "fits_tokens": fits}
    row["plain_by_formula_gib"] = plain_bytes(shape, layers, batch * tokens, size) / GIB
    with machine.attention():
        with machine.cap(cap):
            row["fits_peak_gib"] = _run(machine, model, hidden(machine, shape, 1, fits), 2)["peak_gib"]
            row["plain_capped"] = _fails(machine, model, hidden(machine, shape, batch, tokens))
        x = hidden(machine, shape, batch, tokens)
        manager = _manager(machine, cap, host_budget)
        row |= _run(machine, model, x, 5, manager.step)
        row |= _moved(manager)
        peak = row["peak_gib"] * GIB if machine.cuda else manager.streams.peak_memory()
        row["within_cap"] = peak <= cap
        machine.restart_peak()
        plain = _run(machine, model, x, 3)
    row |= {"plain_step_s": plain["step_s"], "plain_peak_gib": plain["peak_gib"]}
    row |= {"of_plain": row["step_s"] / plain["step_s"], "losses_equal": row["loss"] == plain["loss"]}
    return row


def equal_peak(machine: Machine, tokens: int, layers: int, shape: Shape, host_budget: int) -> dict[str, Any]:
    """Swap with the peak of full recompute as its budget: `faster` is how many times its step is faster.

    A swap that costs nothing would be (2F + B) / (F + B) times faster, 1.29 to 1.33: F the time of a forward, B that of
    a backward, 2 to 2.5 F.
    """
    model, x = make(machine, Layer, shape, layers), hidden(machine, shape, 1, tokens)
    with machine.attention():
        recompute = _run(machine, model, x, 2, run=recomputed)
        machine.restart_peak()
        budget = int(recompute["peak_gib"] * GIB) if machine.cuda else plain_bytes(shape, 1, tokens, 4)
        manager = _manager(machine, budget, host_budget)
        row = _run(machine, model, x, 5, manager.step)
    return {
        "case": "equal-peak",
        "tokens": tokens,
        "layers": layers,
        **row,
        **_moved(manager),
        "recompute_step_s": recompute["step_s"],
        "recompute_peak_gib": recompute["peak_gib"],
        "faster": recompute["step_s"] / row["step_s"],
        "losses_equal": row["loss"] == recompute["loss"],
    }


def _manager(machine: Machine, budget: int, host_budget: int) -> SwapManager:
    """One that profiles its second step and follows the plan from the third."""
    small = {} if machine.cuda else {"min_bytes": 1024}
    return SwapManager(budget, host_budget, machine.device, SwapSettings(stable_steps=1, policies=1, **small))


def _run(
    machine: Machine,
    model: nn.Module,
    x: Tensor,
    steps: int,
    step: Step = contextlib.nullcontext,
    run: Callable[[nn.Module, Tensor], Tensor] = layer_by_layer,
) -> dict[str, Any]:
    """Of the last of them, two where there are four or more; the peak is theirs too."""
    last = 2 if steps > 3 else 1
    timed_steps(machine, model, x, steps - last, step, run)
    machine.restart_peak()
    seconds, losses = timed_steps(machine, model, x, last, step, run)
    return {"step_s": statistics.median(seconds), "peak_gib": machine.peak_gib(), "loss": float(losses[-1])}


def _fails(machine: Machine, model: nn.Module, x: Tensor) -> str:
    """What a plain step under the cap comes to; on a CPU there is no cap."""
    if not machine.cuda:
        return "no cap on a CPU"
    try:
        timed_steps(machine, model, x, 1, contextlib.nullcontext, layer_by_layer)
    except torch.OutOfMemoryError:
        failed = "out of memory"
    else:
        failed = "fits"
    for p in model.parameters():
        p.grad = None
    machine.restart_peak()
    return failed


def _moved(manager: SwapManager) -> dict[str, Any]:
    planned = [known.plan for known in manager.stages.known if known.plan is not None]
    return {
        "stage": manager.stage.value,
        "moved_gib": sum(plan.moved_bytes for plan in planned) / GIB,
        "planned_peak_gib": max((plan.peak for plan in planned), default=0) / GIB,
        "late_gib": manager.counts.fetched_late / GIB,
    }
