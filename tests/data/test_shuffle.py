"""Permutations: bijective at every length, random enough, and the same for ever."""

from __future__ import annotations

import itertools
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slimpipe.data.shuffle import Permutation


@settings(max_examples=40)
@given(st.integers(1, 200), st.text(max_size=5))
def test_every_element_once(count: int, key: str) -> None:
    order = Permutation(count, key)
    assert sorted(map(order, range(count))) == list(range(count))


def test_order_is_for_ever() -> None:
    """Written down on 2026-11-29: a run that is resumed under another version must see the same data."""
    order = [14, 2, 15, 13, 9, 12, 5, 6, 18, 1, 3, 4, 8, 7, 16, 0, 11, 17, 10, 19]
    assert [Permutation(20, "slimpipe 0 0 0")(i) for i in range(20)] == order
    large = Permutation(10**12, "a key")
    assert [large(i) for i in (0, 1, 10**12 - 1)] == [629314528144, 152268872840, 394409326477]


@pytest.mark.parametrize("count", [3, 4, 5])
def test_all_orders_are_about_equally_likely(count: int) -> None:
    """Chi-squared over all orders of a few elements, where a weak network would show: 4,800 keys."""
    seen = dict.fromkeys(itertools.permutations(range(count)), 0)
    keys = 4800
    for key in range(keys):
        order = Permutation(count, str(key))
        seen[tuple(map(order, range(count)))] += 1
    expected = keys / len(seen)
    statistic = sum((number - expected) ** 2 / expected for number in seen.values())
    freedom = len(seen) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5  # five standard deviations


def test_neighbours_do_not_stay_neighbours() -> None:
    order = Permutation(10_000, "key")
    elements = list(map(order, range(10_000)))
    close = sum(abs(a - b) < 100 for a, b in itertools.pairwise(elements))
    # Two random elements are that close with probability 0.02: 200 times, with deviation 14.
    assert 130 < close < 270


def test_memory_does_not_grow_with_the_length() -> None:
    tracemalloc.start()
    try:
        order = Permutation(10**15, "key")
        found = {order(position) for position in range(0, 10**15, 10**13)}
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found) == 100 and max(found) < 10**15
    assert peak < 100_000
