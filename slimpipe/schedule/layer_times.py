"""A slot with loans layer by layer, with every transfer: what the simulator charges for exchange on given hardware.

In every layer a helper waits for its owner's query, and the owner for its helper's result.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from slimpipe.schedule.exchange_transfers import BatchName, batches, goes_back
from slimpipe.schedule.loan_cost import LoanBytes, Network
from slimpipe.schedule.loans import Loan
from slimpipe.schedule.slot_times import Stay
from slimpipe.schedule.slots import Kind
from slimpipe.schedule.work import Load, Work

_ROUNDING: Final = 1e-9
"""More than floats can be off by: a slot is given up only where it is longer for certain."""


class _Ends(NamedTuple):
    """Owner and helper of each loan, as places among the slot's ranks."""

    owners: list[int]
    helpers: list[int]


class _Round(NamedTuple):
    """One run of attention in a layer: the batches of its queries and of its results, and by rank what is computed, in
    the order of a forward: `own` and `kept` attention to its own slice and what it keeps of its past, `helped` to
    others'. `lent`: whether it waits for results."""

    query: BatchName
    result: BatchName
    pre: list[float]
    own: list[float]
    kept: list[float]
    helped: list[float]
    post: list[float]
    lent: list[bool]

    @property
    def busy(self) -> list[float]:
        return [sum(parts) for parts in zip(self.pre, self.own, self.kept, self.helped, self.post, strict=True)]


@dataclass(frozen=True)
class LayerByLayer:
    """Layers one by one, with their transfers (`schedule.exchange_transfers`).

    `before`: the part of a layer's dense work in front of its attention in the forward (norm, QKV, RoPE), behind it in
    the backward. Batch A starts with the layer, B before the rank's attention, C when it has done what others lent to
    it: before its own past (`loans_first`), so that results travel while both sides are busy, or behind it. A batch of
    one rank starts when its last one has ended and its partner has come to the same, and a rank's links are shared by
    all transfers of a batch. A backward that runs attention again has two such rounds a layer, the forward's first.
    Interference between transfers and compute is left out.
    """

    work: Work
    layers: int
    before: float
    sizes: LoanBytes
    network: Network
    loans_first: bool = True

    def of(self, kind: Kind, pasts: Mapping[int, int | None], loans: Sequence[Loan]) -> dict[int, Stay]:
        rounds = self._rounds(kind, pasts, loans)
        until = self._until(kind, pasts, loans, rounds, math.inf)
        return {rank: Stay(*stay) for rank, *stay in zip(pasts, until, self._busy(rounds), strict=True)}

    def longest(self, kind: Kind, pasts: Mapping[int, int | None], loans: Sequence[Loan], limit: float) -> float:
        rounds = self._rounds(kind, pasts, loans)
        # Nobody is done before all of their own work is.
        if max(self._busy(rounds)) * (1 - _ROUNDING) > limit:
            return math.inf
        return max(self._until(kind, pasts, loans, rounds, limit))

    def _busy(self, rounds: Sequence[_Round]) -> list[float]:
        return [self.layers * sum(work) for work in zip(*(one.busy for one in rounds), strict=True)]

    def _until(
        self,
        kind: Kind,
        pasts: Mapping[int, int | None],
        loans: Sequence[Loan],
        rounds: Sequence[_Round],
        limit: float,
    ) -> list[float]:
        """When each rank can go on; infinity once one of them is seen to be later than `limit`."""
        place = {rank: at for at, rank in enumerate(pasts)}
        ends = _Ends([place[loan.owner] for loan in loans], [place[loan.helper] for loan in loans])
        took = self._transfers(kind, loans)
        now, done = [0.0] * len(place), [0.0] * len(place)
        for _ in range(self.layers):
            done = _meet(ends, _later(now, done), took["A"])
            for query, result, pre, own, kept, helped, post, lent in rounds:
                now = _sum(now, pre)
                done = _meet(ends, _later(now, done), took[query])
                now = _sum(now, own)
                if not self.loans_first:
                    now = _sum(now, kept)
                # Owners have nothing to wait for here but room in the queue of batches.
                now = [
                    max(at, there) + help_ if help_ else at for at, there, help_ in zip(now, done, helped, strict=True)
                ]
                if self.loans_first:
                    posted = [
                        max(at, there) if help_ else there for at, there, help_ in zip(now, done, helped, strict=True)
                    ]
                    now = _sum(now, kept)
                else:
                    posted = _later(now, done)
                done = _meet(ends, posted, took[result])
                now = [
                    (max(at, there) if waits else at) + after
                    for at, there, waits, after in zip(now, done, lent, post, strict=True)
                ]
            if max(now) > limit:
                return [math.inf] * len(now)
        return now

    def _rounds(self, kind: Kind, pasts: Mapping[int, int | None], loans: Sequence[Loan]) -> list[_Round]:
        """Of one layer, each run of attention."""
        work = self.work
        if kind == "F":
            return [self._round("B", "C", work.forward, self.before, pasts, loans)]
        if work.again is None:
            return [self._round("B", "C", work.backward, 1 - self.before, pasts, loans)]
        a, b = work.backward, work.again
        alone = Load(a.dense - b.dense, a.own - b.own, a.token - b.token)
        return [
            self._round("B'", "C'", work.again, self.before, pasts, loans),
            self._round("B", "C", alone, 1 - self.before, pasts, loans),
        ]

    def _round(
        self,
        query: BatchName,
        result: BatchName,
        load: Load,
        first: float,
        pasts: Mapping[int, int | None],
        loans: Sequence[Loan],
    ) -> _Round:
        """`first` of the load's dense part stands in front of attention."""
        dense, own, token = load.dense / self.layers, load.own / self.layers, load.token / self.layers
        lent: defaultdict[int, int] = defaultdict(int)
        helped: defaultdict[int, float] = defaultdict(float)
        for loan in loans:
            tokens = loan.tokens
            lent[loan.owner] += tokens
            helped[loan.helper] += token * tokens
        size, pre, post = self.work.slice_tokens, dense * first, dense * (1 - first)
        busy = [past is not None for past in pasts.values()]
        return _Round(
            query,
            result,
            [pre if here else 0.0 for here in busy],
            [own if here else 0.0 for here in busy],
            [0.0 if past is None else token * (past * size - lent[rank]) for rank, past in pasts.items()],
            [helped[rank] for rank in pasts],
            [post if here else 0.0 for here in busy],
            [here and lent[rank] > 0 for rank, here in zip(pasts, busy, strict=True)],
        )

    def _transfers(self, kind: Kind, loans: Sequence[Loan]) -> dict[BatchName, list[float]]:
        """By batch, how long each loan's transfer takes, if all of a rank's start at once and share its links."""
        rates = [self.network.rate(loan.owner, loan.helper) for loan in loans]
        tokens = [loan.tokens for loan in loans]
        owners = [(loan.owner, rate.bandwidth) for loan, rate in zip(loans, rates, strict=True)]
        helpers = [(loan.helper, rate.bandwidth) for loan, rate in zip(loans, rates, strict=True)]
        took: dict[BatchName, list[float]] = {}
        for batch in batches(kind, self.work.again is not None):
            sizes = {amount: self.sizes.of(kind, batch, amount) for amount in set(tokens)}
            srcs, dsts = (helpers, owners) if goes_back(batch) else (owners, helpers)
            out, into = dict.fromkeys(srcs, 0), dict.fromkeys(dsts, 0)
            for src, dst, amount in zip(srcs, dsts, tokens, strict=True):
                out[src] += sizes[amount]
                into[dst] += sizes[amount]
            took[batch] = [
                rate.latency + max(out[src], into[dst]) / rate.bandwidth
                for rate, src, dst in zip(rates, srcs, dsts, strict=True)
            ]
        return took


def _sum(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [x + y for x, y in zip(a, b, strict=True)]


def _later(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [x if x > y else y for x, y in zip(a, b, strict=True)]


def _meet(ends: _Ends, posted: Sequence[float], took: Sequence[float]) -> list[float]:
    """When each rank's batch has ended: its transfers start when both ends have posted theirs."""
    done = list(posted)
    for owner, helper, time in zip(ends.owners, ends.helpers, took, strict=True):
        end = max(posted[owner], posted[helper]) + time
        if end > done[owner]:
            done[owner] = end
        if end > done[helper]:
            done[helper] = end
    return done
