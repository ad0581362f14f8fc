"""How much the settings of the swap manager matter: one varied at a time, on simulated streams.

    python -m benchmarks.swap_sensitivity      # rows in benchmarks/results/swap_sensitivity.jsonl

The two models of benchmarks/swap_long.py, 300 steps each. Times are the simulated device's: every operator takes
equally long, a copy its bytes over the rate.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.swap_long import BUDGET, train
from slimpipe.swap import SimulatedStreams, SwapManager, SwapSettings

RESULTS = Path(__file__).parent / "results" / "swap_sensitivity.jsonl"
STEPS = 300
VALUES: dict[str, tuple[Any, ...]] = {
    "stable_steps": (1, 2, 4, 8),
    "policies": (1, 2, 5, 8),
    "length_change": (0.01, 0.05, 0.2),
    "similarity": (0.8, 0.95, 0.99),
    "size_weight": (0.0, 0.5, 2.0, 8.0),
}


def measure(kind: str, setting: str, value: Any) -> dict[str, Any]:
    streams = SimulatedStreams(rate=5e8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = SwapSettings(**{"min_bytes": 512, "arena_bytes": 1 << 16, setting: value})
        manager = SwapManager(BUDGET, host_budget=1 << 20, settings=settings, streams=streams)
        over = 0

        def after(i: int) -> None:
            nonlocal over
            over += manager.executor.most_in_use > BUDGET

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
        "over_budget_steps": over,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for kind in ("dense", "experts"):
        for setting, values in VALUES.items():
            for value in values:
                rows.append(measure(kind, setting, value))
                record.append(
                    arguments.output, rows[-1] | record.circumstances("python -m benchmarks.swap_sensitivity")
                )
    columns = {"model": "", "setting": "", "value": "", "kinds": "d", "profiled": "d", "moved_kib_a_step": ".1f"}
    columns |= {"planned_percent": ".1f", "late_percent": ".1f", "stall_percent": ".2f", "over_budget_steps": "d"}
    record.table(rows, columns, f"{STEPS} steps, budget {BUDGET:,} bytes, simulated streams")


if __name__ == "__main__":
    main()
