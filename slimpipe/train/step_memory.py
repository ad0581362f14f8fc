"""A step's memory: predicted, taken before the first step, and measured."""

from __future__ import annotations

import math
import os
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch

from slimpipe.kernels import fuse
from slimpipe.plan.footprint import Footprint
from slimpipe.plan.memory import small_tensor_bytes
from slimpipe.runtime.reserve import SMALL, reserve
from slimpipe.runtime.warm_up import warm_up
from slimpipe.train.forecast import footprints
from slimpipe.train.swapping import pin_host_memory, pinning_slots

if TYPE_CHECKING:
    from slimpipe.train.session import Session


def footprint(session: Session) -> Footprint:
    """The rank's memory as predicted, by term."""
    near = () if session.routes is None else session.routes.groups
    parameters = [sum(parameter.numel() for parameter in session.parameters.values())] * session.shape.p
    fused = fuse.is_available(session.device)
    found = footprints(
        session.config,
        session.planned,
        session.placement,
        parameters,
        session.ce_chunk,
        fused,
        near,
        session.engine.backend.name,
    )
    return found.ranks[session.rank]


def bytes_to_reserve(session: Session) -> int:
    """What torch's allocator should have for a step, shared memory not among it: a hundredth more than predicted, for
    what the prediction may be short of and for pieces that do not fit where one was free. A twentieth more where
    tensors come and go with swaps: 512K tokens had 4 GiB more in the cache than in tensors, and a piece was missing.
    Of that no more than `memory.gpu_budget_gib` leaves."""
    found = footprint(session)
    least, budget = int(1.01 * found.own), session.config.memory.gpu_budget_gib
    if not session.planned.moves:
        return least
    shared = found.total - found.own
    granted = math.inf if budget is None else int(budget * 2**30) - shared
    return max(least, int(min(1.05 * found.own, granted)))


def warm_up_and_reserve(session: Session) -> tuple[int, tuple[int, ...]]:
    """Runs every kernel of a step once and takes its memory, the host's for swaps too. Collective.

    Returns the bytes that one unit keeps for its backward in the largest chunk (`warm_up`), and those of a unit of each
    chunk that can go to the host, measured; nothing where none does.
    """
    config, engine, device = session.config, session.engine, session.device
    together = partial(_on_this_machine, session)
    # What other ranks' plans move counts too: `together` is collective.
    pinning = pinning_slots(config, session.planned, session.rank, device, together)
    # It draws random numbers, and more of them with swaps: the run's are its own.
    untouched = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with untouched, pinning if session.moving.keys else nullcontext():
        unit_bytes = warm_up(engine, config.train.micro_batch, config.model.hidden_size, session.dtype, device)
    swap_bytes: tuple[int, ...] = ()
    if session.moving.units:
        swap_bytes = pin_host_memory(config, engine, session.rank, device, together)
    session.gradient_buffer.zero()
    if device.type == "cuda":
        _ = session.optimizer  # its memory comes before what is left is reserved
        reserve(bytes_to_reserve(session), _small_bytes(session), device)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    return unit_bytes, swap_bytes


def peak_memory(session: Session) -> int:
    """Bytes at most since the warm-up, or since the count was last reset: the device's, with what is shared with other
    ranks; on the CPU the process's resident memory."""
    if session.device.type == "cuda":
        return torch.cuda.max_memory_allocated(session.device) + session.shared_bytes
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _small_bytes(session: Session) -> int:
    """What a step keeps in small tensors: statistics of the units in flight, and a few MiB of all sorts."""
    config = session.config
    tokens = session.slice_tokens * config.train.micro_batch
    layer = small_tensor_bytes(config.model, config.memory.recompute, tokens, SMALL, session.dtype.itemsize)
    layers = max(len(stage.layers) for stage in session.stages)
    return session.planned.peaks.units[session.rank] * layers * layer + 32 * SMALL


def _on_this_machine(session: Session, nbytes: int) -> float:
    """All ranks' bytes on this machine, their mean taken for each."""
    needs = session.gather(torch.tensor([nbytes], dtype=torch.float64, device=session.carrier.memory))
    return float(needs.mean()) * min(session.shape.p, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
