"""Attention backends side by side: forward and backward rates of one slice against its past, 32 query and 8 KV heads.

    python -m benchmarks.attention                  # whatever is installed; rows in benchmarks/results/attention.jsonl
    python -m benchmarks.attention --only cudnn flash4

`two calls`: the slice itself, causal, and its past; `one call`: both as one block, of backends that can. Operations are
those that a causal mask leaves: 4 d a query, head and visible key, and 10 in the backward.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import record
from slimpipe.kernels.attention import AttentionBackend, candidates
from slimpipe.train.attention import versions

RESULTS = Path(__file__).parent / "results" / "attention.jsonl"
HEADS, KV_HEADS, D = 32, 8, 128
SHAPES = [(4096, 0), (4096, 28672), (8192, 0), (8192, 57344), (8192, 122880)]
COLUMNS = {"backend": "", "s": ",", "past": ",", "calls": "", "forward": ".0f", "backward": ".0f", "failed": ""}
Block = tuple[int, int, bool]
"""First and last key, causal."""


def ways(backend: AttentionBackend, s: int, past: int) -> Iterator[tuple[str, list[Block]]]:
    if past == 0:
        yield "own slice", [(0, s, True)]
        return
    yield "two calls", [(past, past + s, True), (0, past, False)]
    if backend.bottom_right:
        yield "one call", [(0, past + s, True)]


def milliseconds(work: Callable[[], Any], runs: int = 5) -> float:
    """The median device time of a few runs; the first compiles."""
    found = []
    for _ in range(runs + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return sorted(found[1:])[runs // 2]


def measure(backend: AttentionBackend, s: int, past: int, blocks: list[Block]) -> dict[str, float]:
    """TFLOP/s."""
    sizes = [(s, HEADS), (past + s, KV_HEADS), (past + s, KV_HEADS), (s, HEADS)]
    q, k, v, dout = (torch.randn(1, t, h, D, dtype=torch.bfloat16, device="cuda") for t, h in sizes)
    parts: list[tuple[Tensor, Tensor]] = []

    def forward() -> None:
        parts[:] = [backend.forward(q, k[:, a:b], v[:, a:b], causal) for a, b, causal in blocks]

    def backward() -> None:
        for (a, b, causal), (out, lse) in zip(blocks, parts, strict=True):
            backend.backward(dout, q, k[:, a:b], v[:, a:b], out, lse, causal)

    keys = past + (s + 1) / 2
    there, back = milliseconds(forward), milliseconds(backward)
    return {"forward": 4 * s * keys * HEADS * D / there / 1e9, "backward": 10 * s * keys * HEADS * D / back / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="backends (default: all that are there)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    found = candidates(device, torch.bfloat16)
    rows: list[dict[str, Any]] = []
    for name in options.only or found:
        for s, past in SHAPES:
            try:
                backend = found[name]()
                for calls, blocks in ways(backend, s, past):
                    row = {"backend": name, "s": s, "past": past, "calls": calls}
                    rows.append(row | measure(backend, s, past, blocks))
            except (RuntimeError, ValueError, TypeError, AssertionError, KeyError) as error:
                reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
                rows.append({"backend": name, "s": s, "past": past, "failed": reason})
    for row in rows:
        full = row | record.circumstances("python -m benchmarks.attention") | {"packages": versions(device)}
        record.append(options.results, full)
    record.table(rows, COLUMNS, "attention, TFLOP/s, 32 query and 8 KV heads of 128, bf16")


if __name__ == "__main__":
    main()
