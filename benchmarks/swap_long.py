"""Thousands of steps with and without swap on simulated streams: the same loss curve, and nothing that grows.

    python -m benchmarks.swap_long [--steps 5000]      # rows in benchmarks/results/swap_long.jsonl

A small dense model and a small mixture of experts, with loss scaling, steps that the scaler skips, validation every 100
steps, a short batch at times and graphs that are dropped. tests/swap/test_long.py runs 120 steps of it.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import gc
import math
import os
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import record
from slimpipe.swap import SimulatedStreams, SwapManager, SwapSettings

RESULTS = Path(__file__).parent / "results" / "swap_long.jsonl"
WIDTH, ROWS = 32, 24
BUDGET = 90_000
"""Bytes: about half of what a step saves."""


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Experts(nn.Module):
    """Every row goes to the expert with the largest gate: sizes differ from step to step."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, count), nn.ModuleList(Dense() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return out


class Model(nn.Module):
    def __init__(self, kind: str, layers: int = 4) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(layers))
        self.layers = nn.ModuleList(Dense() if kind == "dense" else Experts() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return x


def train(
    kind: str, steps: int, step: Callable[[], AbstractContextManager[None]], after: Callable[[int], None]
) -> array.array[float]:
    """Losses of all steps, as they come; `after` is called with the number of each finished step."""
    torch.manual_seed(0)
    model = Model(kind)
    teacher = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(7)) / math.sqrt(WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=50)
    losses = array.array("d")
    for i in range(steps):
        rows = 5 if i % 37 == 36 else ROWS
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(i))
        with step():
            loss = (model(x) - (x @ teacher).relu()).square().mean()
            # Now and then a gradient overflows: the scaler skips the optimizer's step.
            scaler.scale(loss * (math.inf if i % 53 == 52 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        losses.append(loss.item())
        if i % 100 == 99:
            with step(), torch.set_grad_enabled(i % 200 == 99):  # with gradients on: a graph that is dropped
                losses.append(model(x).square().mean().item())
        after(i)
    return losses


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run(kind: str, steps: int) -> dict[str, Any]:
    """One row. `grown`: what differs between step 200 (or the middle) and the end."""
    early = min(200, steps // 2) - 1
    plain_sizes: dict[str, int] = {}

    def after_plain(i: int) -> None:
        if i in (early, steps - 1):
            plain_sizes["early" if i == early else "late"] = resident()

    plain = train(kind, steps, contextlib.nullcontext, after_plain)
    streams = SimulatedStreams(order="random", seed=1, rate=1e9)
    settings = SwapSettings(min_bytes=512, arena_bytes=1 << 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        manager = SwapManager(BUDGET, host_budget=1 << 20, settings=settings, streams=streams)
        sizes: dict[str, dict[str, int]] = {}
        most, over = 0, 0

        def after(i: int) -> None:
            nonlocal most, over
            peak = streams.peak_memory(restart=True)
            most, over = max(most, peak), over + (peak > BUDGET)
            if i in (early, steps - 1):
                sizes["early" if i == early else "late"] = {**manager.sizes(), "resident_bytes": resident()}

        begin = time.perf_counter()
        swapped = train(kind, steps, manager.step, after)
        seconds = time.perf_counter() - begin
    counts = manager.counts
    return {
        "model": kind,
        "steps": steps,
        "losses_equal": plain == swapped,
        "first_loss": plain[0],
        "last_loss": plain[-2],
        "faults": len(streams.faults),
        "stage": manager.stage.value,
        "kinds_of_step": len(manager.stages.known),
        "moved_out_bytes": counts.moved_out,
        "planned_share": counts.planned_out / max(1, counts.moved_out),
        "late_share": counts.fetched_late / max(1, counts.moved_in),
        "mismatches": counts.mismatches,
        "profiled_steps": manager.profiled_steps,
        "most_of_budget": most / BUDGET,
        "steps_over_budget": over,
        "plain_resident_bytes": plain_sizes,
        "early": sizes["early"],
        "late": sizes["late"],
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    command = f"python -m benchmarks.swap_long --steps {arguments.steps}"
    for kind in ("dense", "experts"):
        row = run(kind, arguments.steps)
        record.append(arguments.output, row | record.circumstances(command))
        print(row, flush=True)


if __name__ == "__main__":
    main()
