"""Kernels of a step, from torch's profiler: seconds by kind, what lies beside NCCL's, and what that costs them."""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

KINDS = {
    "nccl": ("nccl",),
    "attention": ("fmha", "flash", "attention", "sdpa", "cudnn_generated"),
    "gemm": ("gemm", "nvjet", "xmma", "cutlass", "cublas"),
    "copies": ("memcpy", "memset"),
}
"""Words in a kernel's name, in lower case; the first that fits counts. What fits none is elementwise."""


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "elementwise")


@dataclass(frozen=True)
class Kernel:
    """`start` and `seconds` in seconds; `blocks`: thread blocks of its grid."""

    name: str
    start: float
    seconds: float
    stream: int
    blocks: int

    @property
    def kind(self) -> str:
        return kind_of(self.name)


def recorded(profile: torch.profiler.profile) -> list[Kernel]:
    """The kernels and copies of a finished profile, by start."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        return kernels_of(json.loads(file.read_text(encoding="utf-8"))["traceEvents"])


def kernels_of(events: Iterable[dict[str, Any]]) -> list[Kernel]:
    found = []
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            arguments = event.get("args", {})
            blocks = 1
            for size in arguments.get("grid", ()):
                blocks *= size
            seconds = event["dur"] / 1e6
            found.append(Kernel(event["name"], event["ts"] / 1e6, seconds, int(arguments.get("stream", 0)), blocks))
    return sorted(found, key=lambda kernel: kernel.start)


def summary(kernels: Sequence[Kernel]) -> dict[str, Any]:
    """Of one rank's step. All in seconds, but counts.

    `kernels_s`: by kind, streams added up. `compute_s`: some kernel but NCCL's ran. `beside_nccl_s`: of that, while one
    of NCCL's ran too. `slowed_s`: what kernels beside NCCL's took longer than kernels of the same name and grid with
    none beside them took on average (those with none to compare with are left out, and attention, whose time hangs on
    the length of the past too). `nccl_blocks`: thread blocks that NCCL's kernels held at once, at most.
    """
    transfers = [kernel for kernel in kernels if kernel.kind == "nccl"]
    compute = [kernel for kernel in kernels if kernel.kind not in ("nccl", "copies")]
    by_kind: dict[str, float] = dict.fromkeys((*KINDS, "elementwise"), 0.0)
    for kernel in kernels:
        by_kind[kernel.kind] += kernel.seconds
    busy, waiting = merged(compute), merged(transfers)
    alone: dict[tuple[str, int], list[float]] = defaultdict(list)
    beside: dict[tuple[str, int], list[float]] = defaultdict(list)
    for kernel in (kernel for kernel in compute if kernel.kind != "attention"):
        shared = overlap(waiting, kernel.start, kernel.start + kernel.seconds)
        where = beside if shared > 0.5 * kernel.seconds else alone if shared == 0 else None
        if where is not None:
            where[kernel.name, kernel.blocks].append(kernel.seconds)
    slowed: dict[str, float] = defaultdict(float)
    compared = 0.0
    for key, times in beside.items():
        if key in alone:
            compared += sum(times)
            slowed[kind_of(key[0])] += sum(times) - len(times) * sum(alone[key]) / len(alone[key])
    return {
        "kernels_s": {kind: round(seconds, 4) for kind, seconds in by_kind.items()},
        "compute_s": round(sum(stop - start for start, stop in busy), 4),
        "beside_nccl_s": round(sum(overlap(waiting, start, stop) for start, stop in busy), 4),
        "compared_s": round(compared, 4),
        "slowed_s": {kind: round(seconds, 4) for kind, seconds in sorted(slowed.items())},
        "nccl_blocks": most_at_once(transfers),
        "launches": len(kernels),
    }


def merged(kernels: Iterable[Kernel]) -> list[tuple[float, float]]:
    """Disjoint intervals in which some of the kernels ran."""
    found: list[tuple[float, float]] = []
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        stop = kernel.start + kernel.seconds
        if found and kernel.start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((kernel.start, stop))
    return found


def overlap(intervals: Sequence[tuple[float, float]], start: float, stop: float) -> float:
    """Seconds of start .. stop that lie in the (disjoint, sorted) intervals."""
    total = 0.0
    for first, last in intervals[max(0, bisect_right(intervals, (start, float("inf"))) - 1) :]:
        if first >= stop:
            break
        total += max(0.0, min(last, stop) - max(first, start))
    return total


def most_at_once(kernels: Iterable[Kernel]) -> int:
    """Thread blocks of kernels that ran at the same time, at most."""
    changes = [(kernel.start, kernel.blocks) for kernel in kernels]
    changes += [(kernel.start + kernel.seconds, -kernel.blocks) for kernel in kernels]
    now = most = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most
