"""Sequences are followed through omissions, insertions and other sizes."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from slimpipe.swap.features import Feature, Matcher


def feature(kind: int, rows: int = 8) -> Feature:
    return Feature((rows, kind), "bfloat16", rows * kind, kind)


SEQUENCE = [feature(kind) for kind in (1, 2, 3, 1, 2, 3, 4, 1, 2, 3, 5)]


def numbers(seen: list[Feature], window: int = 32) -> list[int | None]:
    matcher = Matcher(SEQUENCE, window)
    return [matcher.match(f) for f in seen]


def test_the_same_sequence() -> None:
    assert numbers(SEQUENCE) == list(range(11))


def test_left_out() -> None:
    assert numbers(SEQUENCE[:4] + SEQUENCE[6:]) == [0, 1, 2, 3, 6, 7, 8, 9, 10]


def test_inserted() -> None:
    assert numbers(SEQUENCE[:4] + [feature(9)] + SEQUENCE[4:]) == [0, 1, 2, 3, None, 4, 5, 6, 7, 8, 9, 10]


def test_a_short_batch() -> None:
    """Other sizes at the same places; no jump to a later place that has the size by chance."""
    short = [feature(f.operator, rows=3) for f in SEQUENCE]
    assert numbers(short) == list(range(11))
    by_chance = [feature(1, rows=3), feature(2), *short[2:]]
    assert numbers(by_chance) == list(range(11))


def test_a_sequence_of_another_kind() -> None:
    other = [feature(kind) for kind in (7, 8, 9, 7, 8, 9)]
    assert numbers(other) == [None] * 6


def test_more_than_was_expected() -> None:
    assert numbers(SEQUENCE + [feature(1)] * 3)[11:] == [None] * 3


@st.composite
def edited(draw: Any) -> tuple[list[Feature], list[tuple[int, Feature]]]:
    """A sequence, and what is left of it after some are left out and some inserted: (true place or -1, feature)."""
    sequence = [feature(draw(st.integers(1, 6)), draw(st.integers(1, 3))) for _ in range(draw(st.integers(1, 40)))]
    seen: list[tuple[int, Feature]] = []
    for place, f in enumerate(sequence):
        action = draw(st.sampled_from(["keep"] * 12 + ["leave out", "insert"]))
        if action != "leave out":
            seen.append((place, f))
        if action == "insert":
            seen.append((-1, feature(50 + place)))
    return sequence, seen


@given(edited())
def test_numbers_rise_and_fit(case: tuple[list[Feature], list[tuple[int, Feature]]]) -> None:
    sequence, seen = case
    matcher = Matcher(sequence)
    found = [matcher.match(f) for _, f in seen]
    given_out = [number for number in found if number is not None]
    assert given_out == sorted(set(given_out))
    for (place, f), number in zip(seen, found, strict=True):
        if number is not None:
            assert sequence[number].operator == f.operator
        assert place != -1 or number is None
    assert matcher.exact + matcher.loose + matcher.unmatched == len(seen)
