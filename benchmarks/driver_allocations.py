"""What torch's allocator asked of the driver in a step, and why it had to, from the history that it records.

A step should find all its memory in the cache (`slimpipe.runtime.reserve`). Where it does not, the numbers beside the
stack tell which of three it is: too little was reserved (`free` is below `wanted`); enough is free, but in pieces
(`largest` is below `wanted`); or memory waits for another stream before it can be used again (`pending`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SMALL = 2**20
"""Bytes: larger tensors have a pool of their own."""
_ROUNDING = 512
_ALLOCATIONS = ("segment_alloc", "segment_map")


@dataclass(frozen=True)
class DriverAllocation:
    """Bytes, all of one stream and one pool (of small or of large tensors), at the moment of asking.

    `size` was asked of the driver, `wanted` by the tensor (None: not in the history). `free` of the cache, and the
    `largest` piece of it. `pending`: given back, and not yet free, since another stream has used it. `frames`: the
    stack, innermost first.
    """

    size: int
    wanted: int | None
    stream: int
    small: bool
    allocated: int
    free: int
    largest: int
    pending: int
    frames: tuple[str, ...]


class _Pool:
    """Segments and tensors of one stream and one size class, by address."""

    def __init__(self) -> None:
        self.segments: dict[int, int] = {}
        self.live: dict[int, int] = {}
        self.pending: dict[int, int] = {}

    def gaps(self) -> Iterable[int]:
        live = sorted(self.live.items())
        for start, size in self.segments.items():
            at = start
            for address, taken in live:
                if start <= address < start + size:
                    yield address - at
                    at = address + taken
            yield start + size - at


def driver_allocations(
    segments: Sequence[Mapping[str, Any]], trace: Iterable[Mapping[str, Any]]
) -> list[DriverAllocation]:
    """`segments`: one device's, of `torch.cuda.memory._snapshot()` before; `trace`: of its `device_traces` after."""
    pools: defaultdict[tuple[int, bool], _Pool] = defaultdict(_Pool)
    pool_of: dict[int, tuple[int, bool]] = {}
    for segment in segments:
        key = segment["stream"], segment["segment_type"] == "small"
        pool = pools[key]
        pool.segments[segment["address"]] = segment["total_size"]
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                pool.live[address] = block["size"]
                pool_of[address] = key
                if block["state"] == "active_pending_free":
                    pool.pending[address] = block["size"]
            address += block["size"]
    events = list(trace)
    found = []
    for index, event in enumerate(events):
        action, address, size = event["action"], event.get("addr", 0), event["size"]
        if action in _ALLOCATIONS:
            wanted = _wanted(events[index + 1 :], address, size)
            key = event["stream"], (size if wanted is None else wanted) <= SMALL
            pool = pools[key]
            gaps = list(pool.gaps())
            frames = tuple(f"{frame['filename']}:{frame['line']} {frame['name']}" for frame in event.get("frames", ()))
            found.append(
                DriverAllocation(
                    size,
                    wanted,
                    *key,
                    sum(pool.live.values()),
                    sum(gaps),
                    max(gaps, default=0),
                    sum(pool.pending.values()),
                    frames,
                )
            )
            pool.segments[address] = size
        elif action in ("segment_free", "segment_unmap"):
            for pool in pools.values():
                pool.segments.pop(address, None)
        elif action == "alloc":
            pool_of[address] = event["stream"], size <= SMALL
            pools[pool_of[address]].live[address] = -(-size // _ROUNDING) * _ROUNDING
        elif action == "free_requested" and address in pool_of:
            pool = pools[pool_of[address]]
            pool.pending[address] = pool.live.get(address, size)
        elif action == "free_completed" and address in pool_of:
            pool = pools[pool_of.pop(address)]
            pool.live.pop(address, None)
            pool.pending.pop(address, None)
    return found


def _wanted(later: Sequence[Mapping[str, Any]], address: int, size: int) -> int | None:
    """Bytes of the tensor that the segment was asked for: the next that is made, if it lies in there."""
    event = next((event for event in later if event["action"] == "alloc"), None)
    if event is None or not address <= event["addr"] < address + size:
        return None
    return int(event["size"])
