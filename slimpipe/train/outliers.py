"""Ranks that stand out: slower than their share of the work explains, or fuller than the prediction explains.

Every rank's step takes equally long, for they wait for each other; what tells a slow one is the time that its compute
took. The numbers are those that the metrics gather anyway.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence


class Outliers:
    """Judges ranks by medians over `window` steps, at the end of each window; says what has changed since the last.

    `work[r]`: the compute that the plan gives rank r, in any unit; `memory[r]`: its predicted bytes. `threshold`: how
    much more than the others is too much (1.3: 30 %); None: never.
    """

    def __init__(self, window: int, threshold: float | None, work: Sequence[float], memory: Sequence[int]) -> None:
        self._window, self._threshold = window, threshold
        self._work, self._memory = work, memory
        self._busy: list[Sequence[float]] = []
        self._full: list[Sequence[int]] = []
        self._named: dict[tuple[str, int], bool] = {}

    def see(self, busy_seconds: Sequence[float], peak_bytes: Sequence[int]) -> list[str]:
        """A line for each rank that has become an outlier, or is one no longer."""
        if self._threshold is None or len(self._work) < 2:
            return []
        self._busy.append(busy_seconds)
        self._full.append(peak_bytes)
        if len(self._busy) < self._window:
            return []
        said = [*self._slow(self._threshold), *self._over(self._threshold)]
        self._busy, self._full = [], []
        return said

    def _slow(self, threshold: float) -> list[str]:
        paces = [
            statistics.median(step[rank] for step in self._busy) / work for rank, work in enumerate(self._work) if work
        ]
        usual = statistics.median_low(paces)
        said = []
        for rank, pace in enumerate(paces):
            if self._changed("slow", rank, pace > threshold * usual):
                verdict = "is slow" if pace > threshold * usual else "is slow no longer"
                said.append(
                    f"rank {rank} {verdict}: its compute takes {pace / usual:.2f} times what its share of the work "
                    f"takes elsewhere (median of {self._window} steps; log.outlier_threshold {threshold:g})"
                )
        return said

    def _over(self, threshold: float) -> list[str]:
        """By the difference to the prediction, for what a process takes besides is the same on all."""
        peaks = [max(step[rank] for step in self._full) for rank in range(len(self._memory))]
        extra = [peak - predicted for peak, predicted in zip(peaks, self._memory, strict=True)]
        usual, room = statistics.median_low(extra), (threshold - 1) * statistics.median_low(peaks)
        said = []
        for rank, over in enumerate(extra):
            if self._changed("full", rank, over - usual > room):
                verdict = "uses more memory than" if over - usual > room else "is back at the memory that"
                said.append(
                    f"rank {rank} {verdict} the others explain: {peaks[rank] / 2**30:.2f} GiB, "
                    f"{(over - usual) / 2**30:.2f} GiB more beyond its prediction than usual "
                    f"(log.outlier_threshold {threshold:g})"
                )
        return said

    def _changed(self, what: str, rank: int, now: bool) -> bool:
        before = self._named.get((what, rank), False)
        self._named[what, rank] = now
        return now != before
