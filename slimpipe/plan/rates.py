"""Rates that depend on how much is done at once."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class SizedRate:
    """A rate by tokens: `points` (tokens, rate), ascending. Between two of them a straight line over the logarithm of
    the tokens; below the first and above the last, those."""

    points: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, rate: float | Mapping[int, float], unit: float = 1.0) -> SizedRate:
        """One rate for every size, or one for each."""
        table = rate if isinstance(rate, Mapping) else {1: rate}
        return cls(tuple(sorted((tokens, unit * value) for tokens, value in table.items())))

    def at(self, tokens: int) -> float:
        """The rate for so many tokens, at least 1."""
        sizes = [size for size, _ in self.points]
        above = bisect_left(sizes, tokens)
        if above == 0 or above == len(sizes):
            return self.points[min(above, len(sizes) - 1)][1]
        (low, slow), (high, fast) = self.points[above - 1 : above + 1]
        share = math.log(tokens / low) / math.log(high / low)
        return slow + share * (fast - slow)
