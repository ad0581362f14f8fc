"""Why the allocator went to the driver, on a history made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.driver_allocations import DriverAllocation, driver_allocations

MIB = 2**20
BASE = 0x1000 * MIB
FRAME = {"filename": "exchange.py", "line": 7, "name": "take"}


def block(mib: int, state: str = "active_allocated") -> dict[str, Any]:
    return {"size": mib * MIB, "state": state}


def segment(*blocks: dict[str, Any], stream: int = 0, at: int = BASE) -> dict[str, Any]:
    size = sum(block["size"] for block in blocks)
    kind = {"stream": stream, "segment_type": "large", "device": 0}
    return {"address": at, "total_size": size, "blocks": list(blocks), **kind}


def event(action: str, mib: int, size: int, stream: int = 0) -> dict[str, Any]:
    """At `mib` MiB behind BASE, of `size` MiB."""
    frames = [FRAME] if action == "segment_alloc" else []
    return {"action": action, "addr": BASE + mib * MIB, "size": size * MIB, "stream": stream, "frames": frames}


def only(segments: list[dict[str, Any]], trace: list[dict[str, Any]]) -> DriverAllocation:
    [found] = driver_allocations(segments, trace)
    return found


MORE = [event("segment_alloc", 1000, 60), event("alloc", 1000, 60)]


def test_enough_is_free_but_in_pieces() -> None:
    held = [segment(block(50, "inactive"), block(10), block(40, "inactive"))]
    found = only(held, MORE)
    assert (found.size, found.wanted) == (60 * MIB, 60 * MIB)
    assert (found.allocated, found.free, found.largest, found.pending) == (10 * MIB, 90 * MIB, 50 * MIB, 0)
    assert found.frames == ("exchange.py:7 take",) and not found.small


def test_too_little_was_reserved() -> None:
    found = only([segment(block(50), block(40, "inactive"))], [event("alloc", 50, 30), *MORE])
    assert (found.allocated, found.free, found.largest) == (80 * MIB, 10 * MIB, 10 * MIB)


@pytest.mark.parametrize("completed", [False, True])
def test_memory_that_waits_for_another_stream_is_told(completed: bool) -> None:
    given_back = [event("free_requested", 0, 70), *[event("free_completed", 0, 70)] * completed]
    found = only([segment(block(70), block(5))], [*given_back, *MORE])
    assert (found.pending, found.free) == ((0, 70 * MIB) if completed else (70 * MIB, 0))


def test_another_streams_memory_is_not_free_here() -> None:
    found = only([segment(block(100, "inactive"), stream=9)], MORE)
    assert (found.stream, found.free) == (0, 0)


def test_small_tensors_have_a_pool_of_their_own() -> None:
    """The driver is asked for 2 MiB, for a tensor of one."""
    found = only([segment(block(100, "inactive"))], [event("segment_alloc", 1000, 2), event("alloc", 1000, 1)])
    assert (found.small, found.wanted, found.free) == (True, MIB, 0)


def test_segments_that_go_back_are_free_no_longer() -> None:
    held = [segment(block(80, "inactive"))]
    assert only(held, [event("segment_free", 0, 80), *MORE]).free == 0
