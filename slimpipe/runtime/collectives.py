"""Collective operations among all pipeline ranks, beside the work between: reduce, broadcast, gather.

Each communicator has, on a GPU, a stream of its own; NCCL runs a communicator's operations in posting
order, so the plan has every rank post them in the same one (schedule.vocabulary).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from slimpipe.runtime.carrier import Carrier
from slimpipe.runtime.contact import contact_with
from slimpipe.schedule.collectives import COMMUNICATORS, Communicator

# Newer releases of torch have this name, and warn of the old one.
_all_gather: Final = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> Tensor:
        """Its result, once the work that follows may use it (on a GPU the device waits, not the host)."""
        ...


class Collectives(Protocol):
    """Operations over all pipeline ranks; roots are pipeline ranks. The host never waits here."""

    def reduce(self, communicator: Communicator, tensor: Tensor, root: int) -> Pending:
        """Sum of every rank's tensor, at `root`. Elsewhere the tensor's content is undefined from here on."""
        ...

    def broadcast(self, communicator: Communicator, tensor: Tensor, root: int) -> Pending:
        """`root`'s tensor everywhere; elsewhere `tensor` is overwritten."""
        ...

    def gather(self, communicator: Communicator, tensor: Tensor) -> Pending:
        """Every rank's tensor, stacked by rank, on every rank."""
        ...


class _Work:
    def __init__(
        self, work: dist.Work | None, result: Tensor, kept: Tensor, others: Sequence[int], carrier: Carrier
    ) -> None:
        self._work, self._result, self._kept, self._others, self._carrier = work, result, kept, others, carrier

    def wait(self) -> Tensor:
        if self._work is not None:
            with contact_with(self._others, "collective of the vocabulary passes"):
                self._work.wait()
        return self._carrier.incoming(self._result)


class DistributedCollectives:
    """torch.distributed, gloo or NCCL. Creation is collective over all processes of the default group."""

    def __init__(self, ranks: Sequence[int], rank: int, carrier: Carrier) -> None:
        self._ranks, self._carrier = ranks, carrier
        self._others = [other for other in range(len(ranks)) if other != rank]
        self._groups = {
            communicator: carrier.new_group(ranks, f"vocabulary {communicator}") for communicator in COMMUNICATORS
        }
        for group in self._groups.values():  # sets them up, in one order
            dist.all_reduce(torch.zeros(1, device=carrier.memory), group=group)

    def reduce(self, communicator: Communicator, tensor: Tensor, root: int) -> Pending:
        tensor = self._carrier.outgoing(tensor)
        work = dist.reduce(tensor, self._ranks[root], group=self._groups[communicator], async_op=True)
        return _Work(work, tensor, tensor, self._others, self._carrier)

    def broadcast(self, communicator: Communicator, tensor: Tensor, root: int) -> Pending:
        tensor = self._carrier.outgoing(tensor)
        work = dist.broadcast(tensor, self._ranks[root], group=self._groups[communicator], async_op=True)
        return _Work(work, tensor, tensor, self._others, self._carrier)

    def gather(self, communicator: Communicator, tensor: Tensor) -> Pending:
        tensor = self._carrier.outgoing(tensor)
        parts = tensor.new_empty(len(self._ranks), *tensor.shape)
        # Into one tensor: given a list, torch makes another of all parts, and copies out of it.
        into = parts.flatten(0, 1)
        work = _all_gather(into, tensor, group=self._groups[communicator], async_op=True)
        return _Work(work, parts, tensor, self._others, self._carrier)
