"""Memory of equal size on every rank of a node, open to all of them, and the lanes that are cut out of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import torch
from torch import Tensor

from slimpipe.runtime.symmetric.lane import Incoming, Outgoing
from slimpipe.runtime.symmetric.ring import padded

COUNTER_BYTES: Final = 64
"""Apart, so that two are never in one line."""

Key = TypeVar("Key", bound=Hashable)


class Arena(Protocol):
    """Memory, all zero at first, of which every rank of a node has as much."""

    def bytes(self, rank: int, start: int, size: int) -> Tensor:
        """A rank's bytes [size] uint8."""
        ...


@dataclass(frozen=True)
class Lane:
    """From pipeline rank `src` to each of `dsts`, through a ring of `capacity` bytes."""

    src: int
    dsts: tuple[int, ...]
    capacity: int

    @property
    def counters(self) -> int:
        return 1 + len(self.dsts)


@dataclass(frozen=True)
class Layout:
    """Where lanes lie: each has counters in front, of which the first is `ready`, in each receiver's memory, and the
    others are `taken`, one a receiver, in the sender's; then come the rings, each in its sender's memory."""

    counters: Mapping[Hashable, int]
    rings: Mapping[Hashable, int]
    size: int


def lay_out(lanes: Mapping[Key, Lane]) -> Layout:
    """The same on every rank, from the same lanes in the same order."""
    counters: dict[Hashable, int] = {}
    rings: dict[Hashable, int] = {}
    head = padded(sum(lane.counters for lane in lanes.values()) * COUNTER_BYTES)
    ends: defaultdict[int, int] = defaultdict(lambda: head)
    counted = 0
    for key, lane in lanes.items():
        counters[key] = counted * COUNTER_BYTES
        counted += lane.counters
        rings[key] = ends[lane.src]
        ends[lane.src] += lane.capacity
    return Layout(counters, rings, max(ends.values(), default=head))


def open_lanes(
    lanes: Mapping[Key, Lane], layout: Layout, arena: Arena, rank: int
) -> tuple[dict[Key, Outgoing], dict[Key, Incoming]]:
    """This rank's ends."""
    outgoing: dict[Key, Outgoing] = {}
    incoming: dict[Key, Incoming] = {}
    for key, lane in lanes.items():
        if rank != lane.src and rank not in lane.dsts:
            continue
        first = layout.counters[key]
        ring = arena.bytes(lane.src, layout.rings[key], lane.capacity)
        ready = {dst: counter(arena, dst, first) for dst in lane.dsts}
        taken = {
            dst: counter(arena, lane.src, first + place * COUNTER_BYTES) for place, dst in enumerate(lane.dsts, start=1)
        }
        if rank == lane.src:
            outgoing[key] = Outgoing(ring, tuple(ready.values()), tuple(taken.values()))
        else:
            incoming[key] = Incoming(ring, ready[rank], taken[rank])
    return outgoing, incoming


def counter(arena: Arena, rank: int, start: int) -> Tensor:
    """[1] int32."""
    return arena.bytes(rank, start, 4).view(torch.int32)
