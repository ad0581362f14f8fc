"""Where in the KV buffer loans are cut from: by hand, and over random pasts."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimpipe.schedule import without
from slimpipe.schedule.lending import Range, cut


@st.composite
def lendings(draw: st.DrawFn) -> tuple[list[Range], int, list[int]]:
    """One or two ranges of past, where the own slot lies, and amounts that the past holds."""
    edges = sorted(draw(st.lists(st.integers(0, 40), min_size=2, max_size=4, unique=True)))
    past = [(edges[0], edges[1])] + ([(edges[2], edges[3])] if len(edges) == 4 else [])
    length = sum(stop - start for start, stop in past)
    amounts: list[int] = []
    for amount in draw(st.lists(st.integers(1, 12), max_size=6)):
        if sum(amounts) + amount <= length:
            amounts.append(amount)
    own = draw(st.sampled_from([edges[-1], edges[0] - 1]))
    return past, own, amounts


def test_by_hand() -> None:
    """What is left stays beside the own slot: on its right in even microbatches, on its left in odd ones."""
    assert cut([(0, 10)], 10, [3, 2]) == [[(0, 3)], [(3, 5)]]
    assert cut([(5, 15)], 4, [3, 2]) == [[(12, 15)], [(10, 12)]]
    # The far range first, if it has room for the whole loan.
    assert cut([(0, 4), (8, 12)], 12, [3]) == [[(0, 3)]]
    assert cut([(0, 4), (8, 16)], 16, [5, 4]) == [[(8, 13)], [(0, 4)]]
    # No range has five left: the loan is cut in two.
    assert cut([(0, 4), (8, 12)], 12, [5]) == [[(0, 4), (8, 9)]]
    assert cut([(0, 4)], 4, []) == []


@given(lendings())
def test_pieces_are_disjoint_and_of_the_asked_lengths(lending: tuple[list[Range], int, list[int]]) -> None:
    past, own, amounts = lending
    cuts = cut(past, own, amounts)
    assert [sum(stop - start for start, stop in pieces) for pieces in cuts] == amounts
    pieces = sorted(piece for found in cuts for piece in found)
    assert all(a[1] <= b[0] for a, b in pairwise(pieces))
    assert all(any(start <= a and b <= stop for start, stop in past) for a, b in pieces)
    left = without(past, pieces)
    taken = {at for a, b in pieces for at in range(a, b)}
    assert [at for a, b in left for at in range(a, b)] == [
        at for start, stop in past for at in range(start, stop) if at not in taken
    ]
    if len(past) == 1:
        assert len(left) <= 1
        assert all(len(found) == 1 for found in cuts)
        if left and own >= past[0][1]:
            assert left[0][1] == past[0][1]


@given(lendings())
def test_loans_are_cut_in_two_only_where_they_must(lending: tuple[list[Range], int, list[int]]) -> None:
    """As long as the owner keeps at least as much as it lends to any one helper, each gets one range."""
    past, own, amounts = lending
    kept = sum(stop - start for start, stop in past) - sum(amounts)
    if amounts and max(amounts) <= kept:
        assert all(len(found) == 1 for found in cut(past, own, amounts))


@pytest.mark.parametrize(
    ("lent", "left"),
    [
        ([], [(0, 10), (20, 30)]),
        ([(0, 10)], [(20, 30)]),
        ([(3, 5), (6, 7)], [(0, 3), (5, 6), (7, 10), (20, 30)]),
        ([(25, 30), (0, 2)], [(2, 10), (20, 25)]),
        ([(0, 10), (20, 30)], []),
    ],
)
def test_without(lent: list[Range], left: list[Range]) -> None:
    assert without([(0, 10), (20, 30)], lent) == left
