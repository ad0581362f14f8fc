"""Which calls made torch's allocator go to the driver in mid-step, with their stacks. On GPUs:

    torchrun --nproc-per-node 2 -m benchmarks.allocations
    torchrun --nproc-per-node 2 -m benchmarks.allocations --case 64k-n16-vocab --layers 16 --steps 4

Cases are those of `benchmarks.pipeline`. Each rank prints its own; a step with none prints a line that says so.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter

import torch
import torch.distributed as dist

from benchmarks.driver_allocations import DriverAllocation, driver_allocations
from benchmarks.pipeline import CASES, config_of
from slimpipe.parallel.mesh import prepare_process, start_processes
from slimpipe.train.session import Session

MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, default="64k-n16-balanced")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--carrier", choices=["nccl", "symmetric"], default="nccl", help="parallel.carrier")
    parser.add_argument("--frames", type=int, default=24, help="of a stack, innermost first")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs GPUs: the allocator's history is that of CUDA")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    case = CASES[options.case] | {"ranks": ranks, "layers": options.layers, "steps": options.steps}
    config = config_of(case | {"carrier": options.carrier, "collectives": "auto"})
    prepare_process(config)
    processes = start_processes(config)
    session = Session(config, processes.carrier)
    rank, device = processes.rank, processes.device
    print(f"rank {rank}: {_cache(device)} behind the warm-up", flush=True)
    generator = torch.Generator().manual_seed(0)
    stacks: Counter[tuple[str, ...]] = Counter()
    for step in range(1, options.steps + 1):
        tokens = torch.randint(config.model.vocab_size, (case["m"], case["length"] + 1), generator=generator)
        before = torch.cuda.memory._snapshot(device)["segments"]
        torch.cuda.memory._record_memory_history("all", context="all", stacks="python")
        session.train_step(tokens[:, :-1], tokens[:, 1:])
        trace = torch.cuda.memory._snapshot(device)["device_traces"][device.index]
        torch.cuda.memory._record_memory_history(None)
        mine = [segment for segment in before if segment["device"] == device.index]
        found = driver_allocations(mine, trace)
        for number, allocation in enumerate(found, 1):
            print(f"rank {rank}, step {step}, {number} of {len(found)}: {_told(allocation)}", flush=True)
            if allocation.frames not in stacks:
                print("\n".join(f"    {frame}" for frame in allocation.frames[: options.frames]), flush=True)
            stacks[allocation.frames] += 1
        print(f"rank {rank}, step {step}: {len(found)} driver allocations; {_cache(device)}", flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _told(found: DriverAllocation) -> str:
    wanted = "?" if found.wanted is None else f"{found.wanted / MIB:.2f}"
    return (
        f"{found.size / MIB:.1f} MiB for {wanted} MiB, stream {found.stream:#x}, pool of "
        f"{'small' if found.small else 'large'} tensors: {found.allocated / MIB:.1f} MiB allocated, "
        f"{found.free / MIB:.1f} MiB free, the largest piece {found.largest / MIB:.1f} MiB, "
        f"{found.pending / MIB:.1f} MiB waiting for other streams"
    )


def _cache(device: torch.device) -> str:
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    peak = torch.cuda.max_memory_allocated(device)
    return (
        f"{allocated / MIB:.0f} MiB allocated, {peak / MIB:.0f} MiB at most, {reserved / MIB:.0f} MiB of the driver's"
    )


if __name__ == "__main__":
    main()
