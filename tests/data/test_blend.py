"""Blends: every source within one sample of its share at every point, whatever the weights."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimpipe.data import DataError
from slimpipe.data.blend import Blend, whole_weights

weights_lists = st.lists(st.integers(1, 10_000), min_size=1, max_size=12)


def turns(blend: Blend, count: int) -> list[int]:
    return [blend.turn() for _ in range(count)]


@given(weights_lists)
def test_within_one_sample_of_its_share_at_every_point(weights: list[int]) -> None:
    blend, total, counts = Blend(weights), sum(weights), [0] * len(weights)
    bound = 1 - Fraction(1, max(1, 2 * len(weights) - 2))
    for step in range(1, 200):
        counts[blend.turn()] += 1
        for weight, count in zip(weights, counts, strict=True):
            assert abs(Fraction(weight * step, total) - count) <= bound
    assert blend.counts == counts


def test_where_taking_the_source_furthest_behind_fails() -> None:
    """Megatron's rule is 1.6 samples off here."""
    weights = [1, 3, 1, 2, 1, 1, 179]
    blend, counts = Blend(weights), [0] * 7
    worst = Fraction(0)
    for step in range(1, sum(weights) + 1):
        counts[blend.turn()] += 1
        worst = max(worst, *(abs(Fraction(w * step, sum(weights)) - c) for w, c in zip(weights, counts, strict=True)))
    assert counts == weights
    assert worst <= Fraction(11, 12)


@given(weights_lists, st.integers(0, 300))
def test_its_counts_are_its_whole_state(weights: list[int], done: int) -> None:
    one = Blend(weights)
    turns(one, done)
    other = Blend(weights, one.counts)
    assert turns(one, 50) == turns(other, 50)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=6))
def test_whole_weights(weights: list[float]) -> None:
    whole = whole_weights(weights)
    exact = [Fraction(repr(weight)) for weight in weights]
    assert all(a * exact[0] == b * whole[0] for a, b in zip(whole, exact, strict=True))


def test_weights_as_they_are_written() -> None:
    assert whole_weights([0.3, 0.7]) == (3, 7)
    assert turns(Blend(whole_weights([0.5, 0.25, 0.25])), 8).count(0) == 4
    assert turns(Blend([7]), 3) == [0, 0, 0]
    assert turns(Blend([1, 1]), 6) in ([0, 1] * 3, [1, 0] * 3)


@pytest.mark.parametrize("counts", [[5, 0], [0, 5], [-1, 1], [30, 34]])
def test_counts_that_no_blend_comes_to(counts: list[int]) -> None:
    with pytest.raises(DataError, match="are not of a blend with weights"):
        Blend([1, 1], counts)
