"""How much the settings of the swap manager matter: one varied at a time, on simulated streams.

    python -m benchmarks.swap_sensitivity      # rows in benchmarks/results/swap_sensitivity.jsonl

Steps of the mixture of experts of benchmarks/swap_long.py, and of a model in which everything changes that a setting is
about: lengths from step to step, an activation function in every fifth step, tensors of sizes 1 to 8, over a link that
carries less than there is to move. Times are the simulated device's: every operator takes equally long, a copy its
bytes over the rate.
"""

from __future__ import annotations

import argparse
import random
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import record
from benchmarks.swap_long import BUDGET, WIDTH, train
from slimpipe.swap import SimulatedStreams, SwapManager, SwapSettings

RESULTS = Path(__file__).parent / "results" / "swap_sensitivity.jsonl"
STEPS = 200
VALUES: dict[str, tuple[Any, ...]] = {
    "default": (None,),
    "stable_steps": (1, 8),
    "policies": (1, 8),
    "length_change": (0.01, 0.2),
    "similarity": (0.8, 0.99),
    "size_weight": (0.0, 8.0),
}
"""Beside the defaults: 2, 5, 0.05, 0.95, 2. `size_weight` with one policy: the others try multiples of it."""
RATES = {"experts": 5e8, "varied": 1.5e8}
"""Bytes a second of the link."""
BUDGETS = {"experts": BUDGET, "varied": 2 * BUDGET}
"""Bytes: about half of what a step saves."""


class Varied(nn.Module):
    """Eight residual layers of four widths; `smooth` takes another activation function, of as many operators."""

    def __init__(self) -> None:
        super().__init__()
        widths = [WIDTH * w for w in (1, 2, 4, 8)] * 2
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in widths)
        self.up = nn.ModuleList(nn.Linear(WIDTH, width) for width in widths)
        self.down = nn.ModuleList(nn.Linear(width, WIDTH) for width in widths)

    def forward(self, x: Tensor, smooth: bool) -> Tensor:
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            y = up(norm(x))
            x = x + down(y.tanh() if smooth else nn.functional.gelu(y))
        return x


def train_varied(step: Callable[[], AbstractContextManager[None]], after: Callable[[int], None]) -> None:
    """Most steps have 16 rows, others 3, 12, 24 % less or a quarter."""
    torch.manual_seed(0)
    model, draw = Varied(), random.Random(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for i in range(STEPS):
        rows = 2 * draw.choice((16, 16, 16, 16, 15.5, 14, 12, 4))
        x = torch.randn(int(rows), WIDTH, generator=torch.Generator().manual_seed(i))
        with step():
            model(x, i % 5 == 4).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        after(i)


def measure(kind: str, setting: str, value: Any) -> dict[str, Any]:
    streams = SimulatedStreams(rate=RATES[kind])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        changed = {} if value is None else {setting: value}
        if setting == "size_weight":
            changed["policies"] = 1
        settings = SwapSettings(**{"min_bytes": 512, "arena_bytes": 1 << 16, **changed})
        manager = SwapManager(BUDGETS[kind], host_budget=1 << 20, settings=settings, streams=streams)
        most, over = 0, 0

        def after(i: int) -> None:
            nonlocal most, over
            peak = streams.peak_memory(restart=True)
            most, over = max(most, peak), over + (peak > BUDGETS[kind])

        if kind == "varied":
            train_varied(manager.step, after)
        else:
            train(kind, STEPS, manager.step, after)
    counts = manager.counts
    return {
        "model": kind,
        "setting": setting,
        "value": value,
        "kinds": len(manager.stages.known),
        "profiled": manager.profiled_steps,
        "moved_kib_a_step": counts.moved_out / STEPS / 1024,
        "planned_percent": 100 * counts.planned_out / max(1, counts.moved_out),
        "late_percent": 100 * counts.fetched_late / max(1, counts.moved_in),
        "stall_percent": 100 * streams.stalled / streams.clock,
        "most_of_budget": most / BUDGETS[kind],
        "over_budget_steps": over,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for kind in RATES:
        for setting, values in VALUES.items():
            for value in values:
                rows.append(measure(kind, setting, value))
                record.append(
                    arguments.output, rows[-1] | record.circumstances("python -m benchmarks.swap_sensitivity")
                )
    columns = {"model": "", "setting": "", "value": "", "kinds": "d", "profiled": "d", "moved_kib_a_step": ".1f"}
    columns |= {"planned_percent": ".1f", "late_percent": ".1f", "stall_percent": ".2f"}
    columns |= {"most_of_budget": ".2f", "over_budget_steps": "d"}
    record.table(rows, columns, f"{STEPS} steps, budgets of half of what a step saves, simulated streams")


if __name__ == "__main__":
    main()
