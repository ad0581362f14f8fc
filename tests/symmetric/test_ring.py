"""Pieces of a ring: none lies over another that may still be read, and none waits for more than that asks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimpipe.runtime.symmetric.ring import ALIGNMENT, Ring, padded

SIZES = st.lists(st.integers(1, 6 * ALIGNMENT), min_size=1, max_size=60)


@given(capacity=st.integers(6, 12), sizes=SIZES)
def test_pieces_lie_over_taken_ones_only(capacity: int, sizes: list[int]) -> None:
    ring = Ring(capacity * ALIGNMENT)
    placed = [ring.place(size) for size in sizes]
    for piece in placed:
        assert 0 <= piece.start <= piece.start + piece.size <= ring.capacity
        assert piece.start % ALIGNMENT == 0
        untaken = [other for other in placed if piece.after < other.number < piece.number]
        assert not any(overlap(piece.start, piece.size, other.start, other.size) for other in untaken)
    assert [piece.number for piece in placed] == list(range(1, len(sizes) + 1))
    assert [piece.after for piece in placed] == sorted(piece.after for piece in placed)


@given(slots=st.integers(1, 5), count=st.integers(1, 40))
def test_of_equal_pieces_as_many_are_under_way_as_fit(slots: int, count: int) -> None:
    ring = Ring(slots * 3 * ALIGNMENT)
    for number in range(1, count + 1):
        piece = ring.place(3 * ALIGNMENT)
        assert piece.after == max(0, number - slots)
        assert piece.start == (number - 1) % slots * 3 * ALIGNMENT


@given(capacity=st.integers(6, 12), sizes=SIZES)
def test_a_piece_waits_for_no_more_than_lies_in_its_way(capacity: int, sizes: list[int]) -> None:
    """The newest piece that it waits for lies where it comes to lie, or is one that the skipped end held."""
    ring = Ring(capacity * ALIGNMENT)
    placed = [ring.place(size) for size in sizes]
    for before, piece in zip(placed, placed[1:], strict=False):
        if piece.after > before.after:
            last = placed[piece.after - 1]
            skipped = piece.start == 0 and last.start > before.start
            assert skipped or overlap(piece.start, padded(piece.size), last.start, padded(last.size))


def overlap(start: int, size: int, other: int, other_size: int) -> bool:
    return start < other + other_size and other < start + size


def test_what_no_ring_can_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="a piece of 513 bytes in a ring of 512"):
        Ring(512).place(513)
    with pytest.raises(ValueError, match="positive multiple of 512"):
        Ring(500)
