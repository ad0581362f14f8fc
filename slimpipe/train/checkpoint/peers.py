"""The ranks that save and load together, and how they agree."""

from __future__ import annotations

from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class Peers:
    """All ranks of the job, over a gloo group; this process alone where `group` is None."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank, self.world = (0, 1) if group is None else (dist.get_rank(), dist.get_world_size())

    @classmethod
    def of_job(cls, what: str, seconds: float) -> Peers:
        """All ranks over a group of their own: collective, and alone without a process group.

        Each thread that talks needs its own: a group carries out its operations in order. After `seconds` without an
        answer an operation fails.
        """
        if not dist.is_initialized():
            return cls()
        return cls(dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds), group_desc=what))

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def from_lead(self, value: T) -> T:
        """What the lead gives; the others' values do not count."""
        if self.group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def from_all(self, value: T) -> list[T]:
        """Every rank's value."""
        if self.group is None:
            return [value]
        values: list[T | None] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values  # type: ignore[return-value]

    def largest(self, value: int) -> int:
        """The largest of all ranks' numbers."""
        if self.group is None:
            return value
        number = torch.tensor(value)
        dist.all_reduce(number, dist.ReduceOp.MAX, group=self.group)
        return int(number)
