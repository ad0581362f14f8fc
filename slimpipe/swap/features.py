"""How a saved tensor is known again in the next step: by what it is and where it comes, never by its address.

No torch here.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

SLACK = 8
"""Operators by which a tensor may come before or after its time and be known by it."""


class Feature(NamedTuple):
    """`operator`: number of the operator that saved it, -1 where that is not known. `source`: name of the autograd node
    that made it."""

    shape: tuple[int, ...]
    dtype: object
    nbytes: int
    operator: int
    source: str = ""


def alike(a: Feature, b: Feature) -> bool:
    """The same place in the program, though perhaps another batch or length."""
    return a[3:] == b[3:] and a.dtype == b.dtype and len(a.shape) == len(b.shape)  # operator, source


@dataclass
class Matcher:
    """Follows a known sequence: each new feature gets the number it has there, by what fits first of

    1. the one alike that is due nearest to now, if that is within `SLACK` operators: places between were left out, as
       those of an expert with few tokens;
    2. one alike at the very next place: operators were inserted or left out, or the sequence has no clock;
    3. the same feature, up to `window` places ahead.

    Sizes are the weakest sign: two experts have as many tokens by chance. None of these: the feature is an insertion,
    has no number, and the place stays. `packed_at[i]`: operator at which `expected[i]` is due, never falling; empty: no
    clock.
    """

    expected: Sequence[Feature]
    window: int = 64
    packed_at: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.place = self.exact = self.loose = self.unmatched = 0
        self.drift = 0
        """Operators that the step is behind the sequence: inserted up to the last match, less those left out."""

    def match(self, feature: Feature, operator: int = -1) -> int | None:
        """`operator`: at which the feature was saved."""
        number = self._number(feature, operator)
        if number is None:
            self.unmatched += 1
            return None
        same = self.expected[number] == feature
        self.exact += same
        self.loose += not same
        self.place = number + 1
        if self.packed_at:
            self.drift = operator - self.packed_at[number]
        return number

    def _number(self, feature: Feature, operator: int) -> int | None:
        first, end = self.place, min(self.place + self.window, len(self.expected))
        if self.packed_at:
            now = operator - self.drift
            begin = bisect_left(self.packed_at, now - SLACK, first, end)
            near = range(begin, bisect_right(self.packed_at, now + SLACK, begin, end))
            due = [i for i in near if alike(self.expected[i], feature)]
            if due:
                return min(due, key=lambda i: (abs(self.packed_at[i] - now), self.expected[i] != feature))
        if first < end and alike(self.expected[first], feature):
            return first
        return next((i for i in range(first, end) if self.expected[i] == feature), None)
