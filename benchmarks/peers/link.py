"""What the link between two ranks carries, while each sends to the other: a hardware profile of it for slimpipe."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from benchmarks.jobs import Case
from slimpipe.config import Config
from slimpipe.parallel.mesh import Processes

SMALL, LARGE = 2**10, 2**26
"""Bytes; the large one is a slice's hidden states, 8192 tokens of 4096."""


def run(config: Config, case: Case, processes: Processes) -> dict[str, Any] | None:
    """latency_us and gb_per_s, each way, between ranks 0 and 1."""
    small, large = (_seconds(size, processes) for size in (SMALL, LARGE))
    if processes.rank != 0:
        return None
    return {"latency_us": 1e6 * small, "gb_per_s": LARGE / large / 1e9}


def _seconds(size: int, processes: Processes) -> float:
    """The median of a few exchanges of `size` bytes."""
    away, home = (torch.zeros(size, dtype=torch.uint8, device=processes.device) for _ in range(2))
    other = processes.rank ^ 1
    found = []
    for _ in range(6):
        dist.barrier()
        begin = time.perf_counter()
        operations = [dist.P2POp(dist.isend, away, other), dist.P2POp(dist.irecv, home, other)]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        home[0].item()  # waits for the device
        found.append(time.perf_counter() - begin)
    return statistics.median(found[1:])


def write_profile(row: dict[str, Any], base: Path, path: Path) -> None:
    """The profile of `base` with both its links as measured in `row`."""
    values = yaml.safe_load(base.read_text(encoding="utf-8"))
    link = {"latency_us": row["latency_us"], "gb_per_s": row["gb_per_s"]}
    values |= {"name": f"{values['name']}, slow link", "inside": link, "between": dict(link)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
