"""Which memory a process group's transfers read and write.

NCCL moves a GPU's memory, gloo the host's. With gloo, tensors of a GPU go through host memory: slower by far, but
several processes can then share one GPU, and no fast link is needed. gloo cannot send a GPU's tensors itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from slimpipe.schedule.collectives import COMMUNICATORS

_SHARE: Final = 0.75
"""Of a GPU's multiprocessors: what NCCL's kernels may hold all together."""


def most_thread_blocks(processors: int, p: int, v: int, passes: bool, loans: bool) -> int:
    """Thread blocks that one transfer of NCCL's may hold, so that one of each of a rank's communicators can be on a GPU
    of so many multiprocessors at once.

    A kernel that waits for the other side keeps its multiprocessors, one a block. Were all of them kept, neither
    compute nor the transfer that the others wait for could begin. A rank has a communicator for each directed link, one
    for the exchange's `loans`, and the vocabulary `passes` have theirs.
    """
    links = 0 if p == 1 else 2 if p == 2 and v == 1 else 4
    communicators = links + loans + passes * len(COMMUNICATORS)
    return max(1, int(_SHARE * processors) // max(1, communicators))


@dataclass(frozen=True)
class Carrier:
    """`device`: where ranks compute. `through_host`: transfers go by way of host memory. `ctas`: most thread blocks
    that a transfer of NCCL's may hold; None leaves it to NCCL. `symmetric`: whether ranks of one node send to each
    other through memory that they share (slimpipe.runtime.symmetric); `auto`: those that can."""

    device: torch.device
    through_host: bool = False
    ctas: int | None = None
    symmetric: Literal["never", "auto", "always"] = "never"

    @property
    def memory(self) -> torch.device:
        """Where tensors must lie to be carried."""
        return torch.device("cpu") if self.through_host else self.device

    @property
    def backend(self) -> str:
        """Of torch.distributed."""
        return "nccl" if self.memory.type == "cuda" else "gloo"

    @property
    def binds(self) -> torch.device | None:
        """What a group is bound to when it is made: NCCL then builds its communicator at once, gloo knows no device."""
        return self.device if self.backend == "nccl" else None

    def new_group(self, ranks: Sequence[int], name: str) -> dist.ProcessGroup:
        """A group whose communicator is built at once. Collective over all processes of the default group."""
        options: Any = None
        if self.ctas is not None and self.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options.config.max_ctas = self.ctas
        group: dist.ProcessGroup = dist.new_group(
            list(ranks), device_id=self.binds, group_desc=name, pg_options=options
        )
        return group

    def outgoing(self, tensor: Tensor) -> Tensor:
        """The tensor's values where they can be carried, contiguous: the tensor itself where it lies there."""
        return tensor.contiguous().to(self.memory)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A buffer that can be received into."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.memory)

    def incoming(self, buffer: Tensor) -> Tensor:
        """What came, on the device."""
        return buffer.to(self.device)
