"""A slot with loans layer by layer, with every transfer: what the simulator charges for exchange on given hardware.

In every layer a helper waits for its owner's query, and the owner for its helper's result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slimpipe.schedule.exchange_transfers import BatchName, batches, goes_back
from slimpipe.schedule.loan_cost import LoanBytes, Network
from slimpipe.schedule.loans import Loan
from slimpipe.schedule.slot_times import Stay
from slimpipe.schedule.slots import Kind
from slimpipe.schedule.work import Load, Work


class _Parts(NamedTuple):
    """One rank's time in one layer, in the order of a forward: `own`, `kept` attention to its own slice and what it
    keeps of its past, `helped` to others'. `lent`: whether it waits for results."""

    pre: float
    own: float
    kept: float
    helped: float
    post: float
    lent: bool

    @property
    def busy(self) -> float:
        return self.pre + self.own + self.kept + self.helped + self.post


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
        took = {batch: self._transfers(kind, batch, loans) for batch in batches(kind, self.work.again is not None)}
        now = dict.fromkeys(pasts, 0.0)
        done = dict.fromkeys(pasts, 0.0)
        for _ in range(self.layers):
            done = _meet(loans, _later(now, done), took["A"])
            for query, result, parts in rounds:
                now = {rank: now[rank] + part.pre for rank, part in parts.items()}
                done = _meet(loans, _later(now, done), took[query])
                now = {rank: now[rank] + part.own for rank, part in parts.items()}
                if not self.loans_first:
                    now = {rank: now[rank] + part.kept for rank, part in parts.items()}
                # Owners have nothing to wait for here but room in the queue of batches.
                helped = {rank: max(now[rank], done[rank]) + part.helped for rank, part in parts.items() if part.helped}
                now |= helped
                posted = _later(helped if self.loans_first else now, done)
                if self.loans_first:
                    now = {rank: now[rank] + part.kept for rank, part in parts.items()}
                done = _meet(loans, posted, took[result])
                now = {
                    rank: max(now[rank], done[rank] if part.lent else 0.0) + part.post for rank, part in parts.items()
                }
        busy = {rank: self.layers * sum(parts[rank].busy for _, _, parts in rounds) for rank in pasts}
        return {rank: Stay(now[rank], busy[rank]) for rank in pasts}

    def _rounds(
        self, kind: Kind, pasts: Mapping[int, int | None], loans: Sequence[Loan]
    ) -> list[tuple[BatchName, BatchName, dict[int, _Parts]]]:
        """Of one layer: (batch with the queries, batch with the results, work by rank) of each run of attention."""
        work = self.work
        if kind == "F":
            return [("B", "C", self._parts(work.forward, self.before, pasts, loans))]
        if work.again is None:
            return [("B", "C", self._parts(work.backward, 1 - self.before, pasts, loans))]
        a, b = work.backward, work.again
        alone = Load(a.dense - b.dense, a.own - b.own, a.token - b.token)
        return [
            ("B'", "C'", self._parts(work.again, self.before, pasts, loans)),
            ("B", "C", self._parts(alone, 1 - self.before, pasts, loans)),
        ]

    def _parts(
        self, load: Load, first: float, pasts: Mapping[int, int | None], loans: Sequence[Loan]
    ) -> dict[int, _Parts]:
        """By rank, one layer's work; `first` of its dense part stands in front of attention."""
        dense, own, token = load.dense / self.layers, load.own / self.layers, load.token / self.layers
        lent: defaultdict[int, int] = defaultdict(int)
        helped: defaultdict[int, float] = defaultdict(float)
        for loan in loans:
            lent[loan.owner] += loan.tokens
            helped[loan.helper] += token * loan.tokens
        parts = {}
        for rank, past in pasts.items():
            if past is None:
                parts[rank] = _Parts(0.0, 0.0, 0.0, helped[rank], 0.0, False)
            else:
                kept = token * (past * self.work.slice_tokens - lent[rank])
                parts[rank] = _Parts(dense * first, own, kept, helped[rank], dense * (1 - first), lent[rank] > 0)
        return parts

    def _transfers(self, kind: Kind, batch: BatchName, loans: Iterable[Loan]) -> dict[Loan, float]:
        """How long each loan's transfer of a batch takes, if all of a rank's start at once and share its links."""
        loans = tuple(loans)
        back = goes_back(batch)
        ends = {loan: (loan.helper, loan.owner) if back else (loan.owner, loan.helper) for loan in loans}
        sizes = {loan: self.sizes.of(kind, batch, loan.tokens) for loan in loans}
        out: defaultdict[tuple[int, float], int] = defaultdict(int)
        into: defaultdict[tuple[int, float], int] = defaultdict(int)
        for loan, (src, dst) in ends.items():
            bandwidth = self.network.rate(src, dst).bandwidth
            out[src, bandwidth] += sizes[loan]
            into[dst, bandwidth] += sizes[loan]
        took = {}
        for loan, (src, dst) in ends.items():
            rate = self.network.rate(src, dst)
            shared = max(out[src, rate.bandwidth], into[dst, rate.bandwidth])
            took[loan] = rate.latency + shared / rate.bandwidth
        return took


def _later(a: Mapping[int, float], b: Mapping[int, float]) -> dict[int, float]:
    return {rank: max(a.get(rank, 0.0), time) for rank, time in b.items()}


def _meet(loans: Iterable[Loan], posted: Mapping[int, float], took: Mapping[Loan, float]) -> dict[int, float]:
    """When each rank's batch has ended: its transfers start when both ends have posted theirs."""
    done = dict(posted)
    for loan in loans:
        end = max(posted[loan.owner], posted[loan.helper]) + took[loan]
        for rank in (loan.owner, loan.helper):
            done[rank] = max(done[rank], end)
    return done
