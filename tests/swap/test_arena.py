"""Slots never overlap, nothing is lost, and the next user of a slot is told what reads it still."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slimpipe.swap.arena import PinnedArenas, Slot


def allocate(nbytes: int) -> Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def arenas(budget: int = 1 << 16, arena: int = 1 << 13, **options: Any) -> PinnedArenas:
    values: dict[str, Any] = {"allocate": allocate, "done": lambda event: event == "over", **options}
    return PinnedArenas(budget=budget, arena_bytes=arena, **values)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9000), st.integers(0, 1000)), max_size=60))
def test_slots_do_not_overlap(calls: list[tuple[bool, int, int]]) -> None:
    pool, taken, mark = arenas(), [], 0
    live: list[tuple[Slot, int]] = []
    for take, nbytes, which in calls:
        if take or not live:
            slot = pool.take(nbytes)
            if slot is None:
                assert nbytes > 512
                continue
            mark = mark % 250 + 1
            assert slot.memory.numel() == nbytes
            slot.memory.fill_(mark)
            live.append((slot, mark))
            taken.append(slot)
        else:
            slot, expected = live.pop(which % len(live))
            assert (slot.memory == expected).all()
            pool.give(slot, [])
    assert pool.in_use == sum(slot.end - slot.begin for slot, _ in live)
    assert pool.pinned <= pool.budget
    for slot, expected in live:
        assert (slot.memory == expected).all()
        pool.give(slot, [])
    assert pool.in_use == 0
    # All free blocks have grown together again: the largest arena can be had in one piece.
    if pool.pinned:
        assert pool.take(1 << 13) is not None


def test_the_next_user_waits_for_the_last() -> None:
    pool = arenas(budget=1 << 13)
    first, second = pool.take(1000), pool.take(3000)
    assert first is not None and second is not None and first.after == second.after == []
    pool.give(first, ["reads first", "over"])
    pool.give(second, ["reads second"])
    whole = pool.take(8000)
    assert whole is not None and sorted(whole.after) == ["reads first", "reads second"]
    pool.give(whole, [])
    # Never written to meanwhile: the old reads still count, for each part.
    parts = [pool.take(2000), pool.take(2000)]
    assert all(part is not None and sorted(part.after) == ["reads first", "reads second"] for part in parts)


def test_budget_and_large_slots() -> None:
    pool = arenas(budget=1 << 16)
    assert pool.take(20_000) is not None  # larger than an arena
    assert pool.pinned == 1 << 15
    assert pool.take(1 << 16) is None and pool.refusal is None
    assert arenas(budget=0).take(1) is None
    assert arenas(budget=100).take(1) is None


def test_reserve_pins_ahead_within_the_budget() -> None:
    made: list[int] = []

    def counting(nbytes: int) -> Tensor:
        made.append(nbytes)
        return allocate(nbytes)

    pool = arenas(allocate=counting, budget=3 << 13)
    assert pool.reserve(2 << 13) == 2 << 13 and pool.reserve(1 << 40) == 3 << 13
    while pool.take(4000) is not None:
        pass
    assert made == [1 << 13] * 3


def test_a_rehearsal_pins_what_the_plan_needs() -> None:
    made: list[int] = []

    def counting(nbytes: int) -> Tensor:
        made.append(nbytes)
        return allocate(nbytes)

    pool = arenas(allocate=counting)
    uses = [(8000, 0, 9), (20_000, 1, 3), (5000, 4, 6), (20_000, 4, 8), (100, 5, 7)]
    pool.rehearse(uses)
    assert pool.in_use == pool.peak == 0 and sorted(made) == [1 << 13, 1 << 15]
    slots = {}
    for time in range(10):
        for i, (nbytes, begin, end) in enumerate(uses):
            if end == time:
                pool.give(slots.pop(i), [])
            if begin == time:
                slots[i] = pool.take(nbytes)
                assert slots[i] is not None
    assert len(made) == 2  # and nothing on the fly


@pytest.mark.parametrize("limit", [0, 3000, 1 << 13])
def test_a_machine_without_enough_pinned_memory(limit: int) -> None:
    def refuse(nbytes: int) -> Tensor:
        if nbytes > limit:
            raise RuntimeError("CUDA error: out of memory")
        return allocate(nbytes)

    pool = arenas(allocate=refuse)
    assert (pool.take(600) is not None) == (limit > 600)
    assert pool.take(1 << 14) is None
    assert pool.refusal is not None and "CUDA error: out of memory" in pool.refusal
