"""The vocabulary passes' collectives over symmetric memory: who has a tensor puts it into a ring of its own, and who
wants it reads it from there.

A communicator has two streams a rank, one that puts and one that takes, each in the order of posting. So an operation
is through on a rank once all ranks have posted it and those before it, as with NCCL: a plan that is sound there is
sound here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from slimpipe.runtime.symmetric.arena import Lane, lay_out, open_lanes
from slimpipe.runtime.symmetric.lane import Device, Event, Stream
from slimpipe.runtime.symmetric.ring import padded
from slimpipe.runtime.symmetric.transport import MakeArena
from slimpipe.schedule.collectives import COMMUNICATORS, Communicator

DEPTH: Final = 2
"""Tensors of a kind that a rank may have put before all others have taken the first of them."""

Kind = Literal["reduce", "broadcast", "gather"]
Key = tuple[Communicator, Kind, int]
"""The last is the sender."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of what a slice's passes send: hidden states, their gradient in fp32, the logits' statistics."""

    hidden: int
    wide: int
    statistics: int


def collective_lanes(ranks: int, sizes: Sizes) -> dict[Key, Lane]:
    """Embedding: between rank 0 and all others; output layer: between the last rank and all others, statistics between
    all."""
    roots: dict[Communicator, int] = {"embedding": 0, "output": ranks - 1}
    parts: dict[Communicator, int] = {"embedding": sizes.hidden, "output": sizes.wide}
    lanes: dict[Key, Lane] = {}
    for communicator, root in roots.items():
        others = tuple(rank for rank in range(ranks) if rank != root)
        lanes[communicator, "broadcast", root] = Lane(root, others, DEPTH * padded(sizes.hidden))
        for rank in others:
            lanes[communicator, "reduce", rank] = Lane(rank, (root,), DEPTH * padded(parts[communicator]))
    for rank in range(ranks):
        others = tuple(other for other in range(ranks) if other != rank)
        lanes["output", "gather", rank] = Lane(rank, others, DEPTH * padded(sizes.statistics))
    return lanes


class _Under:
    """An operation under way. What it reads or fills lives as long as this, or until it has been waited for."""

    def __init__(self, current: Callable[[], Stream], ends: Sequence[Event], result: Tensor, *kept: Tensor) -> None:
        self._current, self._ends, self._result, self._kept = current, ends, result, kept

    def wait(self) -> Tensor:
        current = self._current()
        for event in self._ends:
            current.follow(event)
        return self._result


class SymmetricCollectives:
    """`Collectives` among `ranks` ranks, all on one node. Collective over them, with the same `sizes`.

    A reduce adds to the root's own tensor those of the other ranks, one after the other by rank: its order is fixed.
    `where`: the device of the tensors.
    """

    def __init__(
        self, ranks: int, rank: int, device: Device, make_arena: MakeArena, sizes: Sizes, where: torch.device
    ) -> None:
        self._ranks, self._rank, self._device = ranks, rank, device
        lanes = collective_lanes(ranks, sizes)
        layout = lay_out(lanes)
        # Kept, for the lanes are views of it.
        self._arena = make_arena(layout.size)
        self._outgoing, self._incoming = open_lanes(lanes, layout, self._arena, rank)
        self._puts = {communicator: device.side() for communicator in COMMUNICATORS}
        self._takes = {communicator: device.side() for communicator in COMMUNICATORS}
        # Where a part lies until it is added; only one stream ever touches it.
        parts = {key[0]: lanes[key].capacity // DEPTH for key in self._incoming if key[1] == "reduce"}
        self._parts = {root: torch.zeros(size, dtype=torch.uint8, device=where) for root, size in parts.items()}
        # Their kernels are loaded here, not behind a stream that waits for a peer.
        for communicator, part in self._parts.items():
            for dtype in (torch.bfloat16, torch.float32):
                self._takes[communicator].follow(device.current().record())
                self._takes[communicator].add(part.view(dtype), part.view(dtype))
        device.synchronize()

    @torch.no_grad()
    def reduce(self, communicator: Communicator, tensor: Tensor, root: int) -> _Under:
        tensor = tensor.contiguous()
        if self._rank != root:
            return self._under([self._put(communicator, "reduce", tensor)], tensor)
        takes, part = self._behind_compute(self._takes[communicator]), self._parts[communicator]
        part = part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for rank in self._others():
            self._incoming[communicator, "reduce", rank].get(takes, part)
            takes.add(tensor, part)
        return self._under([takes.record()], tensor)

    @torch.no_grad()
    def broadcast(self, communicator: Communicator, tensor: Tensor, root: int) -> _Under:
        tensor = tensor.contiguous()
        if self._rank == root:
            return self._under([self._put(communicator, "broadcast", tensor)], tensor)
        takes = self._behind_compute(self._takes[communicator])
        return self._under([self._incoming[communicator, "broadcast", root].get(takes, tensor)], tensor)

    @torch.no_grad()
    def gather(self, communicator: Communicator, tensor: Tensor) -> _Under:
        tensor = tensor.contiguous()
        parts = tensor.new_empty(self._ranks, *tensor.shape)
        sent = self._put(communicator, "gather", tensor)
        takes = self._behind_compute(self._takes[communicator])
        takes.copy(parts[self._rank], tensor)
        for rank in self._others():
            self._incoming[communicator, "gather", rank].get(takes, parts[rank])
        return self._under([sent, takes.record()], parts, tensor)

    def waits(self) -> Iterator[str]:
        """For the watchdog: what the device waits for, by whom."""
        for (communicator, kind, src), incoming in self._incoming.items():
            if incoming.waits():
                yield f"for rank {src} to post a {kind} of the {communicator}"
        for (communicator, kind, _), outgoing in self._outgoing.items():
            if outgoing.waits():
                yield f"for others to take a {kind} of the {communicator}"

    def _others(self) -> Iterator[int]:
        return (rank for rank in range(self._ranks) if rank != self._rank)

    def _behind_compute(self, stream: Stream) -> Stream:
        """The stream, once the tensors that it is to touch are there and nobody else's: what is computed so far."""
        stream.follow(self._device.current().record())
        return stream

    def _put(self, communicator: Communicator, kind: Kind, tensor: Tensor) -> Event:
        """Done when the tensor's memory is free."""
        puts = self._behind_compute(self._puts[communicator])
        self._outgoing[communicator, kind, self._rank].put(puts, tensor)
        return puts.record()

    def _under(self, ends: Sequence[Event], result: Tensor, *kept: Tensor) -> _Under:
        return _Under(self._device.current, ends, result, *kept)
