"""Who computes how much of whose past: by hand, by exhaustive search, and over random slots."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimpipe.schedule import Network, Rate, sliced_work
from slimpipe.schedule.exchange_report import best
from slimpipe.schedule.moves import Move, balanced_moves, idle_more, levels, pairwise_moves
from slimpipe.schedule.slots import Pasts

PASTS = st.lists(st.one_of(st.none(), st.integers(0, 60)), min_size=1, max_size=12).map(tuple)
IDLE_MORE = st.one_of(st.integers(0, 30).map(float), st.floats(0, 30))


def after(pasts: Pasts, moves: list[Move]) -> list[int]:
    """What each rank computes then."""
    amounts = [past or 0 for past in pasts]
    for move in moves:
        amounts[move.owner] -= move.amount
        amounts[move.helper] += move.amount
    return amounts


def longest(pasts: Pasts, amounts: list[int], more: float) -> float:
    """The longest rank's granules, what a busy rank cannot give away counted as `more` of them."""
    return max((0 if past is None else more) + amount for past, amount in zip(pasts, amounts, strict=True))


def test_pairwise_by_hand() -> None:
    """7 and 1 meet halfway at 4; 5 and 2 differ by 3, of which a half is one whole slice; 3 stays as it is."""
    assert pairwise_moves((7, 2, 3, 5, 1)) == [Move(0, 4, 3), Move(3, 1, 1)]
    assert pairwise_moves((7, 2, None, 5, 1)) == []
    assert pairwise_moves((4, 4)) == pairwise_moves((4,)) == []


@given(PASTS)
def test_pairwise_is_the_papers(pasts: Pasts) -> None:
    moves = pairwise_moves(pasts)
    if None in pasts:
        assert moves == []
        return
    taking_part = [rank for move in moves for rank in (move.owner, move.helper)]
    assert len(taking_part) == len(set(taking_part))
    whole = sorted(past for past in pasts if past is not None)
    halves = [(whole[-1 - j] - whole[j]) // 2 for j in range(len(whole) // 2)]
    assert sorted(move.amount for move in moves) == sorted(half for half in halves if half)


def test_balanced_by_hand() -> None:
    """Equal ones pair first: 9 has 4 too many where 1 has room for 4; then 7 and 3 with 2."""
    assert balanced_moves((9, 7, 5, 3, 1), 0.0, 5) == [Move(0, 4, 4), Move(1, 3, 2)]
    # One rank lends to several; two idle ones take as much more as a busy one cannot give away.
    assert sorted(balanced_moves((12, None, None), 3.0, 3)) == [Move(0, 1, 5), Move(0, 2, 5)]
    # With room for more than there is, a busy rank lends all of its past.
    assert balanced_moves((2, None), 9.0, 2) == [Move(0, 1, 2)]
    assert balanced_moves((None, None), 1.0, 2) == balanced_moves((3,), 1.0, 1) == []


def test_near_helpers_are_preferred() -> None:
    """Ranks 0, 1 on one node and 2, 3 on another: the equal pairs 0-3 and 2-1 would both cross."""
    assert sorted(balanced_moves((9, 1, 9, 1), 0.0, 2)) == [Move(0, 1, 4), Move(2, 3, 4)]
    pasts = (8, 1, 7, 0)
    assert {(m.owner, m.helper) for m in balanced_moves(pasts, 0.0, 4)} == {(0, 3), (2, 1)}
    assert {(m.owner, m.helper) for m in balanced_moves(pasts, 0.0, 2)} >= {(0, 1), (2, 3)}
    network = Network(Rate(0, 2), Rate(0, 1), ranks_per_node=2)
    assert network.rate(0, 1) == network.inside and network.rate(1, 2) == network.between


@given(PASTS, IDLE_MORE, st.integers(0, 40))
def test_a_spare_raises_the_level_no_more_than_it_has_to(pasts: Pasts, more: float, spare: int) -> None:
    """Owners keep the least at which helpers, each so much below, have room for the rest."""
    busy, idle = levels(pasts, more)
    while True:
        rooms = [max(0, (idle if past is None else busy - past) - spare) for past in pasts]
        surplus = sum(max(0, past - busy) for past in pasts if past is not None)
        if surplus <= sum(rooms):
            break
        busy, idle = busy + 1, idle + 1
    moves = balanced_moves(pasts, more, len(pasts), spare)
    assert sum(move.amount for move in moves) == surplus
    kept = after(pasts, moves)
    assert all(kept[move.owner] == busy for move in moves)
    assert all(kept[move.helper] - (pasts[move.helper] or 0) <= rooms[move.helper] for move in moves)


@given(PASTS, IDLE_MORE, st.integers(1, 12))
def test_balanced_is_whole_and_sound(pasts: Pasts, more: float, near: int) -> None:
    moves = balanced_moves(pasts, more, near)
    owners, helpers = {move.owner for move in moves}, {move.helper for move in moves}
    assert not owners & helpers
    assert all(pasts[owner] is not None for owner in owners)
    assert all(move.amount > 0 for move in moves)
    assert len(moves) == len({(move.owner, move.helper) for move in moves}) <= max(0, len(pasts) - 1)
    amounts = after(pasts, moves)
    assert all(amount >= 0 for amount in amounts)


@given(PASTS, IDLE_MORE, st.integers(1, 12))
def test_longest_rank_is_within_a_granule_of_the_best(pasts: Pasts, more: float, near: int) -> None:
    """Of the best that attention cut at will can reach; and exactly the best of whole granules."""
    if all(past is None for past in pasts):
        return
    reached = longest(pasts, after(pasts, balanced_moves(pasts, more, near)), more)
    busy = [past for past in pasts if past is not None]
    bound = max(more, (sum(busy) + len(busy) * more) / len(pasts))
    assert bound - 1e-6 <= reached <= bound + 1 + 1e-6
    whole = (number + part for number in range(sum(busy) + 1) for part in (0.0, more))
    room = {t: sum(int(t - (0 if past is None else more) + 1e-9) for past in pasts) for t in whole if t >= more - 1e-9}
    assert reached == pytest.approx(min(t for t, granules in room.items() if granules >= sum(busy)))


def spread(total: int, ranks: int) -> Iterator[tuple[int, ...]]:
    if ranks == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in spread(total - first, ranks - 1):
            yield (first, *rest)


@pytest.mark.parametrize("more", [0.0, 0.5, 2.0, 3.3])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_exhaustive_search_finds_nothing_shorter(ranks: int, more: float) -> None:
    """Every way to spread the granules, for every slot of few ranks and short pasts."""
    values: list[int | None] = [None, 0, 1, 3] if ranks == 4 else [None, 0, 1, 2, 4, 6]
    for pasts in product(values, repeat=ranks):
        if all(past is None for past in pasts):
            continue
        total = sum(past or 0 for past in pasts)
        shortest = min(longest(pasts, list(amounts), more) for amounts in spread(total, ranks))
        assert longest(pasts, after(pasts, balanced_moves(pasts, more, ranks)), more) == pytest.approx(shortest)


@cache
def fewest(surplus: tuple[int, ...], room: tuple[int, ...]) -> int:
    """The least number of loans that takes all surplus.

    Some loan of a smallest set settles its owner or fills its helper: else amounts could be shifted along a circle or
    to an open end until one did. So it is enough to try all pairs with all that they allow, over and over.
    """
    if not surplus:
        return 0
    found = len(surplus) + len(room)
    for owner, has in enumerate(surplus):
        for helper, space in enumerate(room):
            amount = min(has, space)
            left, free = [*surplus], [*room]
            left[owner] -= amount
            free[helper] -= amount
            rest = fewest(tuple(sorted(filter(None, left))), tuple(sorted(filter(None, free))))
            found = min(found, 1 + rest)
    return found


def test_hardly_more_loans_than_the_fewest() -> None:
    """Finding the fewest is a partition problem. On five ranks the greedy match does; on six it may make one more."""
    for ranks, values, most in ((5, [None, 0, 2, 5, 9], 0), (6, [None, 0, 3, 7, 12], 1)):
        slots = extra = 0
        for pasts in product(values, repeat=ranks):
            moves = balanced_moves(pasts, 2.0, ranks)
            busy, idle = levels(pasts, 2.0)
            surplus = sorted(past - busy for past in pasts if past is not None and past > busy)
            room = sorted(idle if past is None else busy - past for past in pasts if past is None or past < busy)
            more = len(moves) - fewest(tuple(surplus), tuple(filter(None, room)))
            assert 0 <= more <= most
            slots, extra = slots + 1, extra + more
        assert slots > 3000
        assert extra / slots < 0.03


def test_spare_is_left_to_the_helpers() -> None:
    """Owner and helper meet at 5; with one granule to spare the owner keeps 6 and the helper has 4."""
    assert balanced_moves((9, 1), 0.0, 2) == [Move(0, 1, 4)]
    assert balanced_moves((9, 1), 0.0, 2, spare=1) == [Move(0, 1, 3)]
    assert balanced_moves((9, 1), 0.0, 2, spare=99) == []


@given(PASTS, IDLE_MORE, st.integers(0, 20))
def test_any_spare_is_sound(pasts: Pasts, more: float, spare: int) -> None:
    amounts = after(pasts, balanced_moves(pasts, more, len(pasts), spare))
    kept = [amount for amount, past in zip(amounts, pasts, strict=True) if past is not None and amount < past]
    given_to = [
        amount + (0 if past is not None else -levels(pasts, more)[1] + levels(pasts, more)[0])
        for amount, past in zip(amounts, pasts, strict=True)
        if amount > (past or 0)
    ]
    if kept and given_to:
        assert max(given_to) <= min(kept) - spare


def test_idle_ranks_have_time_or_attention_to_fill() -> None:
    """n = 8, share 0.8: a slice of past takes 0.2, so the own half slice is 2 quarters and dense time 4 more."""
    work = sliced_work(8, 0.8, 512)
    assert idle_more(work, "F", "attention", 128) == pytest.approx(2)
    assert idle_more(work, "F", "time", 128) == pytest.approx(2 + 0.2 / 0.05)
    assert idle_more(work, "B", "time", 128) == pytest.approx(2 + 0.4 / 0.125)
    # One slice of past: half of 0.5 would be the best, were it not for the 0.3 that a busy rank cannot give away.
    assert best((512, None), work.forward) == pytest.approx(0.3)
    assert best((2048, None), work.forward) == pytest.approx((0.3 + 0.8) / 2)
