"""Times of logical layers: measured by device events, and by the paper's estimate.

A logical layer is a run of consecutive operators. The paper gives each of them T_iter / N_iter * N_group: as if every
operator of a step took the same time. That is wrong where a few operators are heavy: causal slices, mixtures of
experts. No torch here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """Operators [begin, end) of a step; seconds measured and estimated."""

    begin: int
    end: int
    measured: float
    estimated: float

    @property
    def error(self) -> float:
        """Of the estimate, relative to what was measured."""
        return abs(self.estimated - self.measured) / self.measured if self.measured > 0 else 0.0


def logical_layers(operators: Sequence[int], seconds: Sequence[float], count: int = 64) -> tuple[Layer, ...]:
    """Cuts a step into about `count` runs of as many operators each, at moments: `operators[k]` were called by
    `seconds[k]`. Runs without an operator or without a duration are left out."""
    if len(operators) < 2 or operators[-1] <= operators[0]:
        return ()
    whole = operators[-1] - operators[0]
    cuts = {0, len(operators) - 1}
    for i in range(1, count):
        cuts.add(bisect_left(operators, operators[0] + i * whole / count))
    places = sorted(cuts)
    per_operator = (seconds[-1] - seconds[0]) / whole
    return tuple(
        Layer(operators[a], operators[b], seconds[b] - seconds[a], (operators[b] - operators[a]) * per_operator)
        for a, b in zip(places, places[1:], strict=False)
        if operators[b] > operators[a] and seconds[b] > seconds[a]
    )


def estimate_error(layers: Sequence[Layer]) -> float:
    """Mean error of the equal-time estimate, each layer weighted by its measured time."""
    total = sum(layer.measured for layer in layers)
    return sum(layer.error * layer.measured for layer in layers) / total if total > 0 else 0.0


def estimated_seconds(operators: Sequence[int], seconds: Sequence[float]) -> tuple[float, ...]:
    """The paper's times of all moments: operators of equal duration that add up to the measured total."""
    if len(operators) < 2 or operators[-1] <= operators[0]:
        return tuple(seconds)
    per_operator = (seconds[-1] - seconds[0]) / (operators[-1] - operators[0])
    return tuple(seconds[0] + (operator - operators[0]) * per_operator for operator in operators)
