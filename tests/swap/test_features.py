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


# With a clock: the operators at which tensors are due

EXPERT = ("index", "up", "gelu", "down")


def layers(*tokens: tuple[int, ...], least: int = 0) -> list[tuple[Feature, int]]:
    """Layers of a norm and experts with that many tokens each, 10 operators a tensor: (feature, operator), without
    those of fewer than `least` tokens. An expert without tokens runs no operators."""
    found, operator = [], 0
    for loads in tokens:
        found.append((Feature((64, 8), "bfloat16", 1024, 1, "norm"), operator))
        for load in loads:
            for source in EXPERT if load else ():
                operator += 10
                if load >= least:
                    found.append((Feature((load, 8), "bfloat16", 16 * load, 2, source), operator))
        operator += 10
    return found


def known_as(expected: list[tuple[Feature, int]], seen: list[tuple[Feature, int]]) -> list[int | None]:
    matcher = Matcher([f for f, _ in expected], packed_at=[at for _, at in expected])
    return [matcher.match(f, at) for f, at in seen]


PROFILED = layers((16, 16, 16, 16), (16, 16, 16, 16))


def test_experts_with_other_numbers_of_tokens() -> None:
    for tokens in ((16, 17, 15, 16), (20, 12, 24, 8), (61, 1, 1, 1)):
        assert known_as(PROFILED, layers(tokens, tokens)) == list(range(34))


def test_as_many_tokens_as_another_expert_by_chance() -> None:
    expected = layers((10, 20, 30, 4), (10, 20, 30, 4))
    assert known_as(expected, layers((20, 30, 4, 10), (30, 4, 10, 20))) == list(range(34))


def test_an_expert_with_few_tokens_is_left_out() -> None:
    found = known_as(PROFILED, layers((24, 2, 24, 14), (16, 2, 32, 14), least=8))
    assert found == [i for i in range(34) if i not in (5, 6, 7, 8, 22, 23, 24, 25)]


def test_an_expert_without_tokens_is_made_up_for_by_the_end_of_its_layer() -> None:
    found = known_as(PROFILED, layers((24, 0, 24, 16), (16, 16, 16, 16)))
    assert found == [*range(13), *range(17, 34)]


def test_an_expert_that_the_profile_lacks_has_no_numbers() -> None:
    expected = layers((24, 24, 16, 0), (16, 16, 16, 16))
    found = known_as(expected, layers((24, 20, 14, 6), (16, 16, 16, 16)))
    assert found == [*range(13), None, None, None, None, *range(13, 30)]


def test_operators_that_save_nothing_come_in_between() -> None:
    late = [(f, at if i < 6 else at + 300) for i, (f, at) in enumerate(layers((16,) * 4, (16,) * 4))]
    assert known_as(PROFILED, late) == list(range(34))


def test_tensors_of_other_nodes_are_not_alike() -> None:
    matcher = Matcher([Feature((8, 8), "bfloat16", 128, 2, "up")])
    assert matcher.match(Feature((8, 8), "bfloat16", 128, 2, "down")) is None
