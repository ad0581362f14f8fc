"""Pinned host memory for a plan's swaps, taken once, before training: pinning costs about 0.4 s a GiB, and must not be
done while a receive is outstanding (docs/architecture.md, "NCCL order").

The units' tensors are measured by one forward of each chunk; the plan says from when to when each is on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slimpipe.runtime.engine import Engine
from slimpipe.runtime.entry import enter
from slimpipe.runtime.kv_slots import SlicePlace
from slimpipe.schedule import Op, Unit
from slimpipe.swap.host_memory import available


class HostMemoryError(ValueError):
    """There is not as much pinned memory as the swaps need."""


@dataclass(frozen=True)
class HostNeed:
    """Of one rank. `uses`: (bytes, begin, end) of each tensor that goes to the host, in places of the rank's list.

    `available`: bytes that the machine had when this was found, before any of its ranks took its own; None: not known.
    """

    unit_bytes: tuple[int, ...]
    """What moves of a unit of each chunk, measured."""
    uses: tuple[tuple[int, int, int], ...]
    available: int | None

    @property
    def peak(self) -> int:
        """Most bytes in use at once."""
        now = peak = 0
        # What ends at a moment makes room for what begins there.
        steps = [(begin, size) for size, begin, _ in self.uses] + [(end, -size) for size, _, end in self.uses]
        for _, size in sorted(steps):
            now += size
            peak = max(peak, now)
        return peak


def host_need(engine: Engine, micro_batch: int, hidden: int, dtype: torch.dtype, device: torch.device) -> HostNeed:
    """Measures this rank's need. Leaves sums in the gradients like the warm-up, and takes no random numbers."""
    chunks = {unit.chunk for unit in engine.swapped}
    sizes = {chunk: _sizes(engine, chunk, micro_batch, hidden, dtype, device) for chunk in sorted(chunks)}
    begins = {action.unit: at for at, action in enumerate(engine.actions) if action.op is Op.OFFLOAD}
    ends = {action.unit: at for at, action in enumerate(engine.actions) if action.op is Op.BACKWARD}
    uses = tuple((size, begin, ends[unit]) for unit, begin in begins.items() for size in sizes[unit.chunk])
    unit_bytes = tuple(sum(sizes.get(chunk, ())) for chunk in range(engine.shape.v))
    return HostNeed(unit_bytes, uses, available() if device.type == "cuda" else None)


def pin(engine: Engine, need: HostNeed, together: float) -> None:
    """Takes the memory. `together`: bytes that this and the machine's other ranks need. Raises HostMemoryError."""
    if need.available is not None and together > need.available:
        raise HostMemoryError(
            f"{need.peak / 2**30:.1f} GiB of pinned host memory are needed, {together / 2**30:.1f} GiB by all ranks of "
            f"this machine, which has {need.available / 2**30:.1f} GiB available"
        )
    problem = engine.swaps.pin(need.uses) if engine.swaps is not None else None
    if problem is not None:
        raise HostMemoryError(problem)


def _sizes(
    engine: Engine, chunk: int, micro_batch: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> list[int]:
    """Of one unit's tensors that can move, in the order in which they do."""
    stage, swaps = engine.stages[chunk], engine.swaps
    assert swaps is not None
    engine.progress.now(f"measuring what a unit of chunk {chunk} keeps")
    place = SlicePlace(0, (), last=engine.shape.n == 1)
    context = engine.context(chunk, 0, place, device)
    tokens = torch.zeros(micro_batch, engine.slice_tokens, dtype=torch.int64, device=device)
    unit = Unit(-1, 0, chunk)
    swaps.begin(tokens)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), swaps.saving(unit):
        x = tokens
        if stage.embedding is None:
            x, _ = enter(torch.zeros(micro_batch, engine.slice_tokens, hidden, dtype=dtype, device=device))
        out = stage.forward(x, context)
        if stage.last and engine.vocabulary is None:
            scale = torch.zeros((), device=device)
            out = stage.loss(out, tokens, scale, engine.ce_chunk, engine.loss)
        sizes = swaps.sizes(unit)
    swaps.forget(unit)
    del out
    return sizes
