"""One case of a peer on one rank: steps on the benchmark's data, and the row they give."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.jobs import Case
from benchmarks.pipeline import PEAK_FLOPS, PROFILE
from slimpipe.config import Config, ModelConfig
from slimpipe.parallel.mesh import Processes
from slimpipe.parallel.optimizer import learning_rate
from slimpipe.plan.flops import layer_flops_per_token, step_flops
from slimpipe.plan.hardware import HardwareProfile
from slimpipe.plan.hardware_file import load_hardware

GIB = 2**30


class System(Protocol):
    """A peer's training on this rank, ready for its first step."""

    notes: dict[str, Any]
    """What else belongs in the row."""

    def step(self, tokens: Tensor, labels: Tensor, rate: float) -> tuple[float, float]:
        """One optimizer step at this learning rate; tokens and labels [m, S] int64 on the device.

        (mean loss, norm of all gradients), which must have waited for the device.
        """
        ...

    def close(self) -> None:
        """Gives back what outlives the process group."""
        ...


Make = Callable[[Config, Case, Processes], System]


def measure(config: Config, case: Case, processes: Processes, make: Make) -> dict[str, Any] | None:
    """Steps of the system that `make` builds; on rank 0 the row, elsewhere None."""
    device = processes.device
    on_gpu = device.type == "cuda"
    started = time.perf_counter()
    system = make(config, case, processes)
    held = 0
    if on_gpu:
        torch.cuda.synchronize(device)
        # What building took beyond what stays is no longer needed.
        gc.collect()
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    ready = time.perf_counter() - started
    generator = torch.Generator().manual_seed(0)
    seconds, losses, norms = [], [], []
    for step in range(config.train.steps):
        shape = (case["m"], case["length"] + 1)
        text = torch.randint(config.model.vocab_size, shape, generator=generator).to(device)
        dist.barrier()
        begin = time.perf_counter()
        loss, norm = system.step(text[:, :-1].contiguous(), text[:, 1:].contiguous(), learning_rate(config, step))
        seconds.append(time.perf_counter() - begin)
        losses.append(loss)
        norms.append(norm)
        if processes.rank == 0:
            print(f"step {step}: {seconds[-1]:.3f} s, loss {loss:.4f}, norm {norm:.4f}", file=sys.stderr, flush=True)
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else 0
    mine = {"seconds": seconds, "peak_gib": peak / GIB, "held_gib": held / GIB}
    everyone: list[Any] = [None] * processes.world
    dist.all_gather_object(everyone, mine)
    notes = system.notes
    system.close()
    if processes.rank != 0:
        return None
    slowest = [max(each) for each in zip(*(found["seconds"] for found in everyone), strict=True)]
    # The first step meets cold caches and compiles; the median leaves it out.
    step_s = statistics.median(slowest[1:] or slowest)
    peak_flops = (PEAK_FLOPS.get(torch.cuda.get_device_name(), 989e12) if on_gpu else 1e12) * processes.world
    return {
        "mfu": step_flops(config.model, case["length"], case["m"]) / step_s / peak_flops,
        "step_s": step_s,
        "step_s_all": [round(one, 4) for one in slowest],
        "tokens_per_s": case["m"] * case["length"] / step_s,
        "loss_first": losses[0],
        "grad_norm_first": norms[0],
        "loss": losses[-1],
        "grad_norm": norms[-1],
        "ready_s": round(ready, 1),
        "activation_gib": max(found["peak_gib"] - found["held_gib"] for found in everyone),
        "held_gib": max(found["held_gib"] for found in everyone),
        "peak_gib": max(found["peak_gib"] for found in everyone),
        "peak_gib_by_rank": " ".join(f"{found['peak_gib']:.1f}" for found in everyone),
        **notes,
    }


def bound_seconds(
    model: ModelConfig, length: int, m: int, ranks: int, hardware: HardwareProfile | None = None
) -> float:
    """What a step's kernels take at the profile's rates, shared evenly: no bubble, no recomputation, nothing between.

    No layout and no system can be faster on these ranks with these kernels (docs/h200.md: 56 % MFU at 64K on an H200).
    """
    hardware = hardware if hardware is not None else load_hardware(PROFILE)
    gemm, attention = layer_flops_per_token(model, length)
    dense = 3 * (model.layers * gemm + 2.0 * model.hidden_size * model.vocab_size) / hardware.gemm.at(length)
    attended = model.layers * attention * (1 / hardware.forward.at(length) + 2.5 / hardware.backward.at(length))
    return m * length * (dense + attended) / ranks
