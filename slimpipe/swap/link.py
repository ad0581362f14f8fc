"""The host link on paper: when copies run, and what a set of swaps does to time and memory. No torch here.

Copies out run in the order in which the tensors were saved, from the moment they were saved. Copies in run in the order
in which they are started, of those started at one moment in that of their first uses. The two directions do not slow
each other beyond the rates given.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slimpipe.swap.timeline import Candidate, Limits, Swap, Timeline

# A clock's rounding: a copy that ends within it of a moment is over by then.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Outcome:
    """What swaps lead to: bytes in use at each moment, pinned bytes at their peak, seconds the compute stream waits."""

    memory: np.ndarray
    host_peak: int
    stalled: float
    seconds: tuple[float, ...]

    @property
    def peak(self) -> int:
        return int(self.memory.max(initial=0))


def ends_of_copies_out(timeline: Timeline, candidates: Sequence[Candidate], limits: Limits) -> dict[int, float]:
    """Seconds at which each copy out is over, by the candidate's name, if nothing waits."""
    free, ends = 0.0, {}
    for candidate in sorted(candidates, key=lambda c: (c.birth, c.name)):
        free = max(free, timeline.seconds[candidate.birth]) + candidate.nbytes / limits.out_rate
        ends[candidate.name] = free
    return ends


def latest_starts_in(timeline: Timeline, candidates: Sequence[Candidate], limits: Limits) -> dict[int, int]:
    """The latest moment at which each copy in may start for all to be in time, by name; backwards from the first uses.

    The link itself is not bound to moments: behind one long operator (an attention backward is four fifths of a layer)
    several copies that were started before it run one after another. -1 where a start lies before the first moment.
    """
    busy_from, starts = float("inf"), {}
    for candidate in sorted(candidates, key=in_order_of_use, reverse=True):
        busy_from = min(timeline.seconds[candidate.first_use], busy_from) - candidate.nbytes / limits.in_rate
        moment = bisect_right(timeline.seconds, busy_from + ROUNDING) - 1
        starts[candidate.name] = min(moment, candidate.first_use)
    return starts


def in_order_of_use(candidate: Candidate) -> tuple[int, int]:
    """The order of copies in. Of two used at one moment the backward asks for the one saved last first."""
    return candidate.first_use, -candidate.name


def swaps_without_stalls(timeline: Timeline, candidates: Sequence[Candidate], limits: Limits) -> list[Swap]:
    """Release as soon, and fetch as late, as the link allows; only those that are away at some moment."""
    ends = ends_of_copies_out(timeline, candidates, limits)
    starts = latest_starts_in(timeline, candidates, limits)
    swaps = []
    for candidate in candidates:
        release = max(bisect_left(timeline.seconds, ends[candidate.name] - ROUNDING), candidate.last_use + 1)
        if release < starts[candidate.name]:
            swaps.append(Swap(candidate, release, starts[candidate.name]))
    return swaps


def memory_with(timeline: Timeline, swaps: Sequence[Swap]) -> np.ndarray:
    """Bytes in use from each moment to the next."""
    change = np.zeros(len(timeline.memory) + 1, dtype=np.int64)
    for swap in swaps:
        change[swap.release] -= swap.candidate.nbytes
        change[swap.prefetch] += swap.candidate.nbytes
    return np.asarray(timeline.memory, dtype=np.int64) + np.cumsum(change)[:-1]


def host_peak(timeline: Timeline, swaps: Sequence[Swap]) -> int:
    """The most pinned bytes in use: each tensor's from its birth to its first use."""
    change = np.zeros(len(timeline.seconds) + 1, dtype=np.int64)
    for swap in swaps:
        change[swap.candidate.birth] += swap.candidate.nbytes
        change[swap.candidate.first_use] -= swap.candidate.nbytes
    return int(np.cumsum(change).max(initial=0))


def simulate(timeline: Timeline, swaps: Sequence[Swap], limits: Limits) -> Outcome:
    """Plays the step moment by moment, waits included."""
    moments = len(timeline.seconds)
    born: list[list[Swap]] = [[] for _ in range(moments)]
    let_go: list[list[Swap]] = [[] for _ in range(moments)]
    fetched: list[list[Swap]] = [[] for _ in range(moments)]
    used: list[list[Swap]] = [[] for _ in range(moments)]
    for swap in sorted(swaps, key=lambda s: s.candidate.name):
        born[swap.candidate.birth].append(swap)
        let_go[swap.release].append(swap)
        fetched[swap.prefetch].append(swap)
        used[swap.candidate.first_use].append(swap)
    out_free = in_free = late = 0.0
    out_end: dict[int, float] = {}
    in_end: dict[int, float] = {}
    seconds = []
    for k in range(moments):
        now = timeline.seconds[k] + late
        for swap in let_go[k]:
            now = max(now, out_end[swap.candidate.name])
        for swap in sorted(fetched[k], key=lambda s: in_order_of_use(s.candidate)):
            begin = max(now, in_free, out_end[swap.candidate.name])
            in_free = in_end[swap.candidate.name] = begin + swap.candidate.nbytes / limits.in_rate
        for swap in born[k]:
            out_free = max(now, out_free) + swap.candidate.nbytes / limits.out_rate
            out_end[swap.candidate.name] = out_free
        for swap in used[k]:
            now = max(now, in_end[swap.candidate.name])
        late = now - timeline.seconds[k]
        seconds.append(now)
    return Outcome(memory_with(timeline, swaps), host_peak(timeline, swaps), late, tuple(seconds))
