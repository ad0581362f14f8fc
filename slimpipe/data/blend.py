"""In which order the sources of a weighted blend take turns.

After any number k of samples, each source has given its weight's share of k to within one sample: at most
1 - 1/(2n - 2) of one, with n sources. That is Tijdeman's bound for the "chairman assignment problem" (Discrete
Mathematics 32, 1980), and it cannot be bettered. Taking the source that is furthest behind, as Megatron's blending
index does, misses it: by 1.6 samples with weights 1:3:1:2:1:1:179.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from fractions import Fraction

from slimpipe.data.errors import DataError


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in the proportion of `weights`, taken as they are written in decimal: 0.3 is 3/10."""
    exact = [Fraction(repr(weight)) for weight in weights]
    scale = 1
    for weight in exact:
        scale *= (weight * scale).denominator
    return tuple(int(weight * scale) for weight in exact)


class Blend:
    """The turns of sources with the given whole weights, all above 0; a function of these alone.

    `counts[i]` is how many samples source i has given so far. They are the whole state: a blend made with the counts of
    another goes on where that one stood.
    """

    def __init__(self, weights: Sequence[int], counts: Sequence[int] | None = None) -> None:
        """Raises DataError if `counts` are not what this blend comes to after any number of samples."""
        self.weights = tuple(weights)
        self.counts = [0] * len(weights) if counts is None else list(counts)
        self.done = sum(self.counts)
        self._total = sum(weights)
        # A source may give its sample j (from 0) at step k (from 1) once it is 1/parts behind: k w - j >= 1/parts. It
        # must by the last k at which it is not more than one sample, less as much, behind.
        self._parts = max(1, 2 * len(weights) - 2)
        behind = (
            abs(weight * self.done - count * self._total) for weight, count in zip(weights, self.counts, strict=True)
        )
        if min(self.counts) < 0 or any(error * self._parts > self._total * (self._parts - 1) for error in behind):
            raise DataError(f"counts {self.counts} are not of a blend with weights {list(weights)}")
        self._waiting: list[tuple[int, int]] = []  # (first step, source)
        self._ready: list[tuple[int, int]] = []  # (last step, source)
        if len(weights) > 1:
            for source in range(len(weights)):
                self._queue(source)

    def turn(self) -> int:
        """The source of the next sample, which is that source's number `counts[source]` before the call."""
        self.done += 1
        source = self._next() if len(self.weights) > 1 else 0
        self.counts[source] += 1
        if len(self.weights) > 1:
            self._queue(source)
        return source

    def _next(self) -> int:
        while self._waiting and self._waiting[0][0] <= self.done:
            _, source = heapq.heappop(self._waiting)
            last = ((self.counts[source] + 1) * self._parts - 1) * self._total // (self._parts * self.weights[source])
            heapq.heappush(self._ready, (last, source))
        return heapq.heappop(self._ready)[1]

    def _queue(self, source: int) -> None:
        ahead = (self.counts[source] * self._parts + 1) * self._total
        heapq.heappush(self._waiting, (-(-ahead // (self._parts * self.weights[source])), source))
