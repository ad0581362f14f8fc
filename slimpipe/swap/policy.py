"""Which tensors to move, and when. Pure data in, plan out; no torch here.

The least that fits: where the memory curve is highest over its limit, among the candidates that are away there the one
with the best score is taken,

    score = covered excess / highest covered excess + C * cube root of size / highest cube root

then the curve is drawn again. First only with swaps that nobody waits for: a tensor leaves when its copy is over, and
comes back by the latest start that is in time, found backwards from its first use. Where these do not suffice, tensors
are made to leave earlier or to come later, at the cost of stalls, the cheapest first. At the end what turned out not to
be needed is given up again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slimpipe.swap.link import Outcome, ends_of_copies_out, host_peak, memory_with, simulate, swaps_without_stalls
from slimpipe.swap.timeline import Candidate, Limits, Policy, Swap, Timeline

TRIES = 8
"""Candidates tried, best first, before a moment is given up as one that cannot be lowered."""

EXCHANGES = 200
"""Exchanges of a chosen candidate for a smaller one that are tried at the end."""


def make_policy(
    timeline: Timeline,
    candidates: Sequence[Candidate],
    limits: Limits,
    size_weight: float = 2.0,
    move_share: float | None = None,
) -> Policy:
    """The policy for one step. `move_share`: move this share of the candidates' bytes, not the least that fits."""
    _check(timeline, candidates, limits)
    search = _Search(timeline, [c for c in candidates if c.nbytes > 0], limits, size_weight)
    if move_share is None:
        search.lower_without_stalls()
        search.lower_with_stalls()
        search.give_up_what_is_not_needed()
    else:
        search.take_share(move_share)
    return search.policy()


class _Search:
    def __init__(self, timeline: Timeline, candidates: list[Candidate], limits: Limits, size_weight: float) -> None:
        self.timeline, self.candidates, self.limits, self.size_weight = timeline, candidates, limits, size_weight
        self.chosen: dict[int, Candidate] = {}
        self.forced: dict[int, Swap] = {}
        """Swaps that stall, by name; the others follow from the link."""
        # Each candidate's swap as if it were alone: where it could be away.
        self.alone = {
            swap.candidate.name: swap for c in candidates for swap in swaps_without_stalls(timeline, [c], limits)
        }
        roots = {c.name: c.nbytes ** (1 / 3) for c in candidates}
        highest = max(roots.values(), default=1.0)
        self.size_score = {name: root / highest for name, root in roots.items()}

    def swaps(self, chosen: dict[int, Candidate] | None = None, forced: dict[int, Swap] | None = None) -> list[Swap]:
        chosen = self.chosen if chosen is None else chosen
        forced = self.forced if forced is None else forced
        free = swaps_without_stalls(self.timeline, list(chosen.values()), self.limits)
        return [forced.get(swap.candidate.name, swap) for swap in free] + [
            forced[name] for name in forced.keys() - {swap.candidate.name for swap in free}
        ]

    def excess(self, swaps: Sequence[Swap]) -> np.ndarray:
        return np.maximum(memory_with(self.timeline, swaps) - self.limits.gpu_bytes, 0)

    def lower_without_stalls(self) -> None:
        excess = self.excess(self.swaps())
        hopeless = np.zeros(len(excess), dtype=bool)
        while (excess * ~hopeless).any():
            worst = int(np.argmax(excess * ~hopeless))
            taken = self._best_of(self._away_at(worst), excess, worst)
            if taken is None:
                hopeless[worst] = True
            else:
                excess = taken

    def _away_at(self, moment: int) -> list[Candidate]:
        return [
            swap.candidate
            for name, swap in self.alone.items()
            if name not in self.chosen and swap.release <= moment < swap.prefetch
        ]

    def _best_of(self, candidates: list[Candidate], excess: np.ndarray, worst: int) -> np.ndarray | None:
        """Takes the best one that lowers the worst moment and the excess in all; the new excess, None if none does."""
        covered = {c.name: self._covered(c, excess) for c in candidates}
        highest = max(covered.values(), default=0) or 1
        score = {name: value / highest + self.size_weight * self.size_score[name] for name, value in covered.items()}
        for candidate in sorted(candidates, key=lambda c: (-score[c.name], c.name))[:TRIES]:
            chosen = {**self.chosen, candidate.name: candidate}
            swaps = self.swaps(chosen)
            after = self.excess(swaps)
            if after[worst] < excess[worst] and after.sum() < excess.sum() and self._host_fits(swaps):
                self.chosen = chosen
                return after
        return None

    def _covered(self, candidate: Candidate, excess: np.ndarray) -> int:
        swap = self.alone[candidate.name]
        return int(np.minimum(excess[swap.release : swap.prefetch], candidate.nbytes).sum())

    def _host_fits(self, swaps: Sequence[Swap]) -> bool:
        return host_peak(self.timeline, swaps) <= self.limits.host_bytes

    def lower_with_stalls(self) -> None:
        """Until the curve is under its limit, or nothing helps: the tensor that costs least time for what it lowers is
        away at the worst moment, whatever the link says."""
        excess = self.excess(self.swaps())
        while excess.any():
            worst = int(np.argmax(excess))
            options = []
            stalled = simulate(self.timeline, self.swaps(), self.limits).stalled
            for candidate, swap in self._to_force(worst, int(excess[worst])):
                forced = {**self.forced, candidate.name: swap}
                chosen = {**self.chosen, candidate.name: candidate}
                swaps = self.swaps(chosen, forced)
                after, outcome = self.excess(swaps), simulate(self.timeline, swaps, self.limits)
                if after[worst] >= excess[worst] or outcome.host_peak > self.limits.host_bytes:
                    continue
                lowered = int(excess[worst] - after[worst])
                options.append(((outcome.stalled - stalled) / lowered, -lowered, candidate.name, forced, chosen, after))
            if not options:
                return
            *_, self.forced, self.chosen, excess = min(options, key=lambda option: option[:3])

    def _to_force(self, moment: int, excess: int) -> list[tuple[Candidate, Swap]]:
        """Candidates with swaps that are away at the moment, changed as little as possible; those first whose waits
        look shortest for the bytes that count, TRIES at most."""
        now = {swap.candidate.name: swap for swap in self.swaps()}
        options = []
        for candidate in self.candidates:
            # Neither where the step itself still needs it, nor where it is away already.
            swap = now.get(candidate.name) or self.alone.get(candidate.name)
            if not candidate.last_use < moment < candidate.first_use:
                continue
            if candidate.name in now and swap is not None and swap.release <= moment < swap.prefetch:
                continue
            if swap is None:
                swap = Swap(candidate, moment, moment + 1)
            forced = Swap(candidate, min(swap.release, moment), max(swap.prefetch, moment + 1))
            seconds = self.timeline.seconds
            wait = max(0.0, seconds[candidate.birth] + candidate.nbytes / self.limits.out_rate - seconds[moment])
            wait += max(
                0.0, candidate.nbytes / self.limits.in_rate - seconds[candidate.first_use] + seconds[forced.prefetch]
            )
            options.append((wait / min(candidate.nbytes, excess), -candidate.nbytes, candidate.name, candidate, forced))
        options.sort(key=lambda option: option[:3])
        return [(candidate, forced) for *_, candidate, forced in options[: 2 * TRIES]]

    def give_up_what_is_not_needed(self) -> None:
        before = self.excess(self.swaps()).sum()
        for candidate in sorted(self.chosen.values(), key=lambda c: (-c.nbytes, c.name)):
            chosen = {name: c for name, c in self.chosen.items() if name != candidate.name}
            forced = {name: swap for name, swap in self.forced.items() if name != candidate.name}
            if self.excess(self.swaps(chosen, forced)).sum() <= before:
                self.chosen, self.forced = chosen, forced
        self._exchange_for_smaller(before)

    def _exchange_for_smaller(self, excess: int) -> None:
        """The last one taken was perhaps larger than what was left to lower: a smaller one in its place may do."""
        tries = EXCHANGES
        for candidate in sorted(self.chosen.values(), key=lambda c: (-c.nbytes, c.name)):
            if candidate.name in self.forced:
                continue
            without = {name: c for name, c in self.chosen.items() if name != candidate.name}
            others = [c for c in self.candidates if c.name not in self.chosen and c.nbytes < candidate.nbytes]
            for other in sorted(others, key=lambda c: (c.nbytes, c.name)):
                if tries == 0:
                    return
                tries -= 1
                chosen = {**without, other.name: other}
                swaps = self.swaps(chosen)
                if self.excess(swaps).sum() <= excess and self._host_fits(swaps):
                    self.chosen = chosen
                    break

    def take_share(self, share: float) -> None:
        """Those that are away longest, until their bytes make up the share; without stalls as long as that goes."""
        wanted = share * sum(candidate.nbytes for candidate in self.candidates)
        order = sorted(self.candidates, key=lambda c: (c.birth - c.first_use, c.name))
        for stall in (False, True):
            for candidate in order:
                taken = sum(c.nbytes for c in self.chosen.values())
                if candidate.name in self.chosen or taken + candidate.nbytes > wanted * (1 + 1e-6):
                    continue
                if candidate.first_use - candidate.last_use < 2:  # there is no moment at which it could be away
                    continue
                chosen = {**self.chosen, candidate.name: candidate}
                swaps = self.swaps(chosen)
                if not stall and len(swaps) < len(chosen):
                    continue
                forced = dict(self.forced)
                for name in chosen.keys() - {swap.candidate.name for swap in swaps}:
                    forced[name] = self._least_late(chosen[name], list(chosen.values()))
                if self._host_fits(self.swaps(chosen, forced)):
                    self.chosen, self.forced = chosen, forced

    def _least_late(self, candidate: Candidate, chosen: Sequence[Candidate]) -> Swap:
        """Away for one moment, the one at which its copies out and back are late the least, on a link that carries all
        of `chosen`."""
        seconds = self.timeline.seconds
        out = ends_of_copies_out(self.timeline, chosen, self.limits)[candidate.name]
        end = seconds[candidate.first_use] - candidate.nbytes / self.limits.in_rate

        def late(moment: int) -> float:
            return max(0.0, out - seconds[moment]) + max(0.0, seconds[moment + 1] - end)

        moment = min(range(candidate.last_use + 1, candidate.first_use), key=late)
        return Swap(candidate, moment, moment + 1)

    def policy(self) -> Policy:
        swaps = sorted(self.swaps(), key=lambda swap: swap.candidate.name)
        outcome: Outcome = simulate(self.timeline, swaps, self.limits)
        fits = outcome.peak <= self.limits.gpu_bytes
        return Policy(tuple(swaps), outcome.peak, fits, outcome.stalled, outcome.host_peak)


def _check(timeline: Timeline, candidates: Sequence[Candidate], limits: Limits) -> None:
    moments = len(timeline.seconds)
    if len(timeline.memory) != moments:
        raise ValueError(f"timeline: {moments} times and {len(timeline.memory)} memory values; needs as many of each")
    if any(b < a for a, b in zip(timeline.seconds, timeline.seconds[1:], strict=False)):
        raise ValueError("timeline: seconds fall from one moment to the next")
    if limits.out_rate <= 0 or limits.in_rate <= 0:
        raise ValueError(
            f"limits: rates are {limits.out_rate} and {limits.in_rate} bytes a second; both must be over 0"
        )
    names = [candidate.name for candidate in candidates]
    if len(set(names)) != len(names):
        raise ValueError("candidates: a name occurs twice")
    for c in candidates:
        if not 0 <= c.birth <= c.last_use < c.first_use < moments:
            raise ValueError(
                f"candidate {c.name}: birth {c.birth}, last use {c.last_use}, first use {c.first_use} of {moments} "
                "moments: needs 0 <= birth <= last use < first use < moments"
            )
