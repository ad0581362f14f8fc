"""The schedules over whole microbatches (n = 1): GPipe, 1F1B and Megatron's interleaved 1F1B.

All run backwards of a chunk with microbatches ascending, so that weight gradients add up in one order whatever
the schedule, and runs under different schedules can be compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence

from slimpipe.schedule.action import Unit
from slimpipe.schedule.plan import Shape


class OneForwardOneBackward:
    """PipeDream-flush: a rank starts backwards as soon as the first one can reach it."""

    name = "1f1b"

    def forwards(self, shape: Shape) -> list[Unit]:
        return [Unit(microbatch, 0, 0) for microbatch in range(shape.m)]

    def backwards(self, shape: Shape) -> list[Unit]:
        return self.forwards(shape)

    def warmup(self, shape: Shape, rank: int) -> int:
        return shape.p - 1 - rank

    def refusal(self, shape: Shape) -> str | None:
        if shape.v > 1:
            return (
                f"pipeline.virtual_stages = {shape.v}: pipeline.schedule = {self.name} has one stage a rank; "
                "use pipeline.virtual_stages = 1 or pipeline.schedule = interleaved"
            )
        return _whole_microbatches(self.name, shape)


class GPipe(OneForwardOneBackward):
    """All forwards, then all backwards: 1F1B whose warm-up never ends."""

    name = "gpipe"

    def warmup(self, shape: Shape, rank: int) -> int:
        return shape.m


class Interleaved:
    """Megatron's interleaved 1F1B: p microbatches pass through all chunks before the next p begin."""

    name = "interleaved"

    def forwards(self, shape: Shape) -> list[Unit]:
        return self._units(shape, range(shape.v))

    def backwards(self, shape: Shape) -> list[Unit]:
        return self._units(shape, range(shape.v)[::-1])

    def warmup(self, shape: Shape, rank: int) -> int:
        return 2 * (shape.p - 1 - rank) + (shape.v - 1) * shape.p

    def refusal(self, shape: Shape) -> str | None:
        if shape.m % shape.p == 0:
            return _whole_microbatches(self.name, shape)
        up = -(-shape.m // shape.p) * shape.p
        return (
            f"train.global_batch gives m = {shape.m} microbatches: pipeline.schedule = {self.name} needs a multiple of "
            f"parallel.pp ({shape.p}); use a batch that gives {up}, {up + shape.p}, ..."
        )

    def _units(self, shape: Shape, chunks: Sequence[int]) -> list[Unit]:
        return [
            Unit(microbatch, 0, chunk)
            for first in range(0, shape.m, shape.p)
            for chunk in chunks
            for microbatch in range(first, first + shape.p)
        ]


def _whole_microbatches(name: str, shape: Shape) -> str | None:
    if shape.n == 1:
        return None
    return (
        f"pipeline.slices = {shape.n}: pipeline.schedule = {name} runs whole microbatches; "
        "use pipeline.slices = 1 or pipeline.schedule = slimpipe"
    )
