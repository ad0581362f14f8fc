"""What it takes to plan a run, which every rank does before it starts: CPU seconds of one core, by p.

    python -m benchmarks.planning_time            # some minutes, no GPU; rows in benchmarks/results/planning_time.jsonl
    python -m benchmarks.planning_time --most 16  # up to 16 ranks
    python -m benchmarks.planning_time --table    # the rows so far

The Llama-8B shape with a layer a stage, slices of 1024 tokens, eight microbatches, vocabulary over ranks; all proofs.
Swaps are placed for GPUs of 8 GiB, which is out of reach for most.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import record
from slimpipe.config import Config, load_config
from slimpipe.train.planning import make_plan
from slimpipe.train.swapping import plan_swaps

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = Path(__file__).parent / "results" / "planning_time.jsonl"
PROFILE: Final = "configs/hardware/h200.yaml"
SLICE, MICROBATCHES, DEVICE_BYTES = 1024, 8, 8 * 2**30
SHAPES: Final = tuple(
    (p, more * p, v) for p in (8, 16, 32, 64) for more, v in ((2, 1), (4, 1), (2, 2)) if p < 64 or (more, v) == (2, 1)
)
"""(p, n, v)."""
CROWDED: Final = (8, 128, 8)
"""A thousand units in flight on each rank: with swaps alone."""
SETTINGS: Final[dict[str, tuple[str, ...]]] = {
    "off": ("pipeline.exchange=off",),
    "balanced": ("pipeline.exchange=balanced",),
    "balanced, at a profile's times": ("pipeline.exchange=balanced", f"pipeline.hardware={ROOT / PROFILE}"),
    "balanced, swap auto": ("pipeline.exchange=balanced", "memory.swap=auto"),
}
STAGES: Final = {
    "building the plan": "build_s",
    "balancing the plan": "loans_s",
    "placing the vocabulary passes": "vocabulary_s",
    "checking the plan": "proofs_s",
    "replaying the plan in NCCL's order": "replay_s",
    "placing the swaps": "swaps_s",
    "checking the swaps": "swap_proofs_s",
}
"""What `make_plan` and `plan_swaps` say that they do, and the row's key for it; `vocabulary_s` has the lowering too."""
COLUMNS: Final = {"p": "", "n": "", "v": "", "setting": "", "actions": ",", "loans": ","} | dict.fromkeys(
    (*STAGES.values(), "total_s"), ".2f"
)


def config_of(p: int, n: int, v: int, setting: str) -> Config:
    return load_config(
        ROOT / "configs/llama_16l.yaml",
        [
            f"parallel.pp={p}",
            f"pipeline.slices={n}",
            f"pipeline.virtual_stages={v}",
            f"data.sequence_length={n * SLICE}",
            f"train.global_batch={MICROBATCHES}",
            f"model.layers={p * v}",
            "model.vocab_size=131072",
            "memory.recompute=norms",
            *SETTINGS[setting],
        ],
    )


class Watch:
    """CPU seconds of each stage: told the next one as it begins."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._stage, self._since = "", time.process_time()

    def now(self, stage: str) -> None:
        at = time.process_time()
        if self._stage:
            key = STAGES[self._stage]
            self.seconds[key] = self.seconds.get(key, 0.0) + at - self._since
        self._stage, self._since = stage, at


def measure(p: int, n: int, v: int, setting: str) -> dict[str, Any]:
    config, watch = config_of(p, n, v, setting), Watch()
    planned = make_plan(config, watch.now)
    planned = plan_swaps(config, planned, torch.device("cuda"), watch.now, assumed_bytes=DEVICE_BYTES)
    watch.now("")
    return {
        "p": p,
        "n": n,
        "v": v,
        "m": MICROBATCHES,
        "setting": setting,
        "actions": sum(map(len, planned.plan.ranks)),
        "loans": 0 if planned.exchange is None else len(planned.exchange.loans),
        **{key: round(seconds, 3) for key, seconds in watch.seconds.items()},
        "total_s": round(sum(watch.seconds.values()), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=64, help="ranks at most")
    parser.add_argument("--table", action="store_true", help="show the rows so far")
    arguments = parser.parse_args()
    if not arguments.table:
        cases = [(shape, setting) for shape in SHAPES for setting in SETTINGS if shape[0] <= arguments.most]
        for (p, n, v), setting in [*cases, (CROWDED, "balanced, swap auto")]:
            row = measure(p, n, v, setting)
            record.append(RESULTS, row | record.circumstances("python -m benchmarks.planning_time"))
            print(row, flush=True)
    rows = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    record.table(rows, COLUMNS, "CPU seconds to plan")


if __name__ == "__main__":
    main()
