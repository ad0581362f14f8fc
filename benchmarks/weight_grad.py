"""Does it pay to add the weight gradients of several slices by one GEMM (`train.weight_grad_slices`)?

    python -m benchmarks.weight_grad            # one GPU; rows in benchmarks/results/weight_grad.jsonl

The four linears of a Llama-8B layer, bf16 factors of s tokens a slice, fp32 sums; what `slimpipe.kernels.weight_grad`
does, copies that bring the factors together included. Microseconds a slice and layer; `gain` over one GEMM a slice.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.attention import milliseconds
from slimpipe.kernels.weight_grad import Waiting, add_matmul

RESULTS = Path(__file__).parent / "results" / "weight_grad.jsonl"
WEIGHTS = {"qkv": (6144, 4096), "output": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
TOKENS, SLICES = (512, 1024, 2048, 4096, 8192), (1, 2, 4, 8)
COLUMNS = {"s": ",", "slices": "", "us": ",.0f", "tflops": ".0f", "gain": "+.1%", "waiting_mib": ",.0f"}


def measure(s: int, slices: int) -> dict[str, Any]:
    """All four weights, `slices` slices of each."""
    factors, sums = [], []
    for out, inner in WEIGHTS.values():
        pairs = [tuple(torch.randn(s, n, device="cuda").bfloat16() for n in (out, inner)) for _ in range(slices)]
        factors.append(pairs)
        sums.append(torch.zeros(out, inner, device="cuda"))

    def work() -> None:
        for acc, pairs in zip(sums, factors, strict=True):
            waiting = Waiting(slices)
            for g, x in pairs:
                if slices == 1:
                    add_matmul(acc, g, x)
                else:
                    waiting.add(acc, g, x)

    time = milliseconds(work) / slices
    operations = 2 * s * sum(out * inner for out, inner in WEIGHTS.values())
    waiting = (slices - 1) * s * 2 * sum(sum(shape) for shape in WEIGHTS.values())
    return {"us": 1e3 * time, "tflops": operations / time / 1e9, "waiting_mib": waiting / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for s in TOKENS:
        for slices in SLICES:
            row: dict[str, Any] = {"s": s, "slices": slices} | measure(s, slices)
            alone = next((found["us"] for found in [*rows, row] if found["s"] == s), row["us"])
            rows.append(row | {"gain": alone / row["us"] - 1})
    for row in rows:
        record.append(options.results, row | record.circumstances("python -m benchmarks.weight_grad"))
    record.table(rows, COLUMNS, "weight gradients of one Llama-8B layer, a slice at a time")


if __name__ == "__main__":
    main()
