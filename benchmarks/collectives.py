"""How to send a slice's hidden states to every pipeline rank, and the other traffic of the vocabulary passes.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.collectives

Broadcast against scatter and all-gather, the fp32 reduce, the gather of statistics; milliseconds by device events,
median of 20. Rows in benchmarks/results/collectives.jsonl.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import record

RESULTS = Path(__file__).parent / "results" / "collectives.jsonl"
HIDDEN = 4096


def median_ms(operation: Callable[[], object]) -> float:
    times = []
    for _ in range(25):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        operation()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[5:])


def measure(tokens: int, device: torch.device) -> dict[str, float]:
    world, rank = dist.get_world_size(), dist.get_rank()
    hidden = torch.randn(tokens, HIDDEN, device=device).bfloat16()
    shard = hidden.chunk(world)[rank].clone()
    parts = [part.clone() for part in hidden.chunk(world)] if rank == world - 1 else None
    wide, stats = hidden.float(), torch.randn(3, tokens, device=device)
    gathered = [torch.empty_like(stats) for _ in range(world)]

    def scatter_and_gather() -> None:
        dist.scatter(shard, parts, src=world - 1)
        dist.all_gather_into_tensor(hidden, shard)

    return {
        "broadcast_ms": median_ms(lambda: dist.broadcast(hidden, src=world - 1)),
        "scatter_gather_ms": median_ms(scatter_and_gather),
        "reduce_fp32_ms": median_ms(lambda: dist.reduce(wide, dst=world - 1)),
        "statistics_ms": median_ms(lambda: dist.all_gather(gathered, stats)),
    }


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rows = []
    for tokens in (4096, 8192):
        row = {"tokens": tokens, "ranks": dist.get_world_size(), **measure(tokens, device)}
        rows.append(row | record.circumstances("torchrun --nproc-per-node 2 -m benchmarks.collectives"))
    if dist.get_rank() == 0:
        path = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
        for row in rows:
            record.append(path, row)
        columns = {"tokens": "d"} | {key: ".3f" for key in rows[0] if key.endswith("_ms")}
        record.table(rows, columns, f"hidden size {HIDDEN}, bf16, {dist.get_world_size()} GPUs")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
