"""What a step looked like, and whether another one looked the same. No torch here.

Three segments: forward, backward, and the tail after the last backward (the optimizer). The steps of a run differ in
the tail when a step is skipped or gradients are accumulated: that changes no swap. So sequences are told apart by
forward and backward alone, by their lengths, by histograms of their operators (a cosine over raw operator numbers means
nothing, and lengths differ), and by the bytes that were saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Segment:
    """`histogram[i]`: how often the operator with number i was called."""

    length: int
    histogram: np.ndarray

    @staticmethod
    def of(numbers: np.ndarray) -> Segment:
        return Segment(len(numbers), np.bincount(numbers))


@dataclass(frozen=True)
class Signature:
    forward: Segment
    backward: Segment
    tail: Segment
    saved_bytes: int

    @staticmethod
    def of(sequence: Sequence[int], saved_bytes: int) -> Signature:
        """`sequence`: number of each operator's name times 2, plus 1 inside a backward."""
        codes = np.asarray(sequence, dtype=np.int64)
        numbers, backward = codes >> 1, (codes & 1).astype(bool)
        last = int(np.flatnonzero(backward)[-1]) + 1 if backward.any() else len(codes)
        before = ~backward[:last]
        return Signature(
            Segment.of(numbers[:last][before]), Segment.of(numbers[backward]), Segment.of(numbers[last:]), saved_bytes
        )


def similar(a: Segment, b: Segment, length_change: float, similarity: float) -> bool:
    if not close(a.length, b.length, length_change):
        return False
    return cosine(a.histogram, b.histogram) >= similarity


def same_sequence(a: Signature, b: Signature, length_change: float, similarity: float) -> bool:
    """Whether one plan is good for both."""
    return (
        similar(a.forward, b.forward, length_change, similarity)
        and similar(a.backward, b.backward, length_change, similarity)
        and close(a.saved_bytes, b.saved_bytes, length_change)
    )


def close(a: int, b: int, change: float) -> bool:
    return abs(a - b) <= change * max(a, b)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """1.0 for two empty histograms, 0.0 where one is empty."""
    n = max(len(a), len(b))
    if not a.any() or not b.any():
        return float(not a.any() and not b.any())
    x, y = np.pad(a, (0, n - len(a))).astype(float), np.pad(b, (0, n - len(b))).astype(float)
    return float(x @ y / np.sqrt((x @ x) * (y @ y)))
