"""Pinned host memory for a plan's swaps, taken once, before training: pinning costs about 0.4 s a GiB, and must not be
done while a receive is outstanding (DESIGN.md sections 7 and 8).

The units' tensors are measured by one forward of each chunk; the plan says from when to when each is on the host.
"""

from __future__ import annotations

import torch

from slimpipe.runtime.engine import Engine
from slimpipe.runtime.entry import enter
from slimpipe.runtime.kv_slots import SlicePlace
from slimpipe.schedule import Op, Unit
from slimpipe.swap.host_memory import available


class HostMemoryError(ValueError):
    """There is not as much pinned memory as the swaps need."""


def pin_for(
    engine: Engine, micro_batch: int, hidden: int, dtype: torch.dtype, device: torch.device, sharers: int
) -> tuple[int, ...]:
    """Bytes of a unit of each chunk that move, measured. `sharers`: processes that pin memory of this machine.

    Leaves sums in the gradients like the warm-up, and takes no random numbers. Raises HostMemoryError.
    """
    swaps = engine.swaps
    assert swaps is not None
    chunks = sorted({unit.chunk for unit in engine.swapped})
    sizes = {chunk: _sizes(engine, chunk, micro_batch, hidden, dtype, device) for chunk in chunks}
    begins = {action.unit: at for at, action in enumerate(engine.actions) if action.op is Op.OFFLOAD}
    ends = {action.unit: at for at, action in enumerate(engine.actions) if action.op is Op.BACKWARD}
    uses = [(size, begin, ends[unit]) for unit, begin in begins.items() for size in sizes[unit.chunk]]
    need, have = _peak(uses), available()
    if device.type == "cuda" and have is not None and need * sharers > have:
        raise HostMemoryError(
            f"{need / 2**30:.1f} GiB of pinned host memory are needed, by each of {sharers} processes here, and this "
            f"machine has {have / 2**30:.1f} GiB available"
        )
    problem = swaps.pin(uses)
    if problem is not None:
        raise HostMemoryError(problem)
    return tuple(sum(sizes.get(chunk, ())) for chunk in range(engine.shape.v))


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


def _peak(uses: list[tuple[int, int, int]]) -> int:
    """Most bytes in use at once."""
    now = peak = 0
    # What ends at a moment makes room for what begins there.
    for _, size in sorted([(begin, size) for size, begin, _ in uses] + [(end, -size) for size, _, end in uses]):
        now += size
        peak = max(peak, now)
    return peak
