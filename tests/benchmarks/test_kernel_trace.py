"""The account of a step's kernels, on a trace made by hand."""

from __future__ import annotations

from typing import Any

from benchmarks.kernel_trace import kernels_of, most_at_once, overlap, summary


def event(name: str, start: float, length: float, stream: int = 7, grid: tuple[int, ...] = (1, 1, 1)) -> dict[str, Any]:
    """A kernel; times in seconds."""
    arguments = {"stream": stream, "grid": list(grid)}
    return {"cat": "kernel", "name": name, "ts": start * 1e6, "dur": length * 1e6, "args": arguments}


def test_kernels_beside_nccl_are_laid_beside_those_alone() -> None:
    events = [
        event("nvjet_a", 0, 1, grid=(132, 1, 1)),
        event("nvjet_a", 10, 1.5, grid=(132, 1, 1)),
        event("nvjet_a", 12, 1.5, grid=(64, 1, 1)),  # another shape: nothing to compare it with
        event("triton_b", 20, 2),
        event("cudnn_generated_sdpa", 30, 1),
        event("cudnn_generated_sdpa", 13.75, 0.25),
        event("ncclDevKernel_SendRecv", 9.5, 4.5, stream=20, grid=(24, 1, 1)),
        event("ncclDevKernel_SendRecv", 10, 1, stream=21, grid=(16, 1, 1)),
        {"cat": "cpu_op", "name": "nvjet", "ts": 0, "dur": 9e9},
    ]
    found = summary(kernels_of(events))
    assert found == {
        "kernels_s": {"nccl": 5.5, "attention": 1.25, "gemm": 4.0, "copies": 0.0, "elementwise": 2.0},
        "compute_s": 7.25,
        "beside_nccl_s": 3.25,
        "compared_s": 1.5,
        "slowed_s": {"gemm": 0.5},
        "nccl_blocks": 40,
        "launches": 8,
    }


def test_overlap_of_intervals() -> None:
    intervals = [(0.0, 1.0), (2.0, 4.0), (6.0, 7.0)]
    assert overlap(intervals, 0.5, 6.5) == 0.5 + 2 + 0.5
    assert overlap(intervals, 4.0, 6.0) == 0 and overlap(intervals, 2.5, 3.0) == 0.5 and overlap([], 0, 1) == 0
    assert most_at_once([]) == 0
