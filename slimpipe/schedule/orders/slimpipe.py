"""The slimpipe order: 1F1B over slices, with one microbatch's slices (and 2(p - 1 - r) more) in flight.

SlimPipe paper (arXiv 2504.14519), sections 4.1 and 4.2.
"""

from __future__ import annotations

from slimpipe.schedule.action import Unit
from slimpipe.schedule.plan import Shape


class SlimPipe:
    name = "slimpipe"

    def forwards(self, shape: Shape) -> list[Unit]:
        return [unit for microbatch in range(shape.m) for unit in self._microbatch(shape, microbatch)]

    def backwards(self, shape: Shape) -> list[Unit]:
        """Microbatches in order; within one, the exact reverse of its forwards, so that keys and values unwind."""
        return [unit for microbatch in range(shape.m) for unit in reversed(self._microbatch(shape, microbatch))]

    def warmup(self, shape: Shape, rank: int) -> int:
        """One less than W_r = n v + 2 (p - 1 - r), the units that rank r may hold.

        Counted in ticks of a forward slot and a backward slot, a unit's way from rank r to the last rank and back is
        2 (p - 1 - r): the first backward arrives in the very tick in which the warm-up has ended. So at any tick all
        ranks are in their forward slot or all in their backward slot, which exchange and vocabulary passes rest on.
        """
        return shape.n * shape.v + 2 * (shape.p - 1 - rank) - 1

    def refusal(self, shape: Shape) -> str | None:
        """Several chunks need a group of at least p slices, or the wrap p-1 -> 0 starves rank 0 into a deadlock."""
        if shape.v == 1 or shape.n >= shape.p:
            return None
        return (
            f"pipeline.virtual_stages = {shape.v} needs pipeline.slices >= parallel.pp ({shape.p}): "
            f"pipeline.slices = {shape.n}; use {shape.p}, {2 * shape.p}, ... slices or pipeline.virtual_stages = 1"
        )

    def _microbatch(self, shape: Shape, microbatch: int) -> list[Unit]:
        """Groups of G slices pass through the rank's chunks in turn."""
        group = slice_group(shape)
        return [
            Unit(microbatch, slice_, chunk)
            for first in range(0, shape.n, group)
            for chunk in range(shape.v)
            for slice_ in range(first, first + group)
        ]


def slice_group(shape: Shape) -> int:
    """G, the smallest divisor of n that is >= min(p, n): the slices that pass through a rank's chunks together.

    A group no shorter than the pipeline keeps every rank busy while the group's first slice travels round to the
    next chunk; a divisor of n keeps the groups of a microbatch equal.
    """
    return next(size for size in range(min(shape.p, shape.n), shape.n + 1) if shape.n % size == 0)
