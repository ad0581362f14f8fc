"""What an exchange does, in numbers: bytes by rank beside the paper's Eq. 2, how far slots are from balanced, and the
memory that loans are received into."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from slimpipe.schedule.exchange_transfers import BatchName, batches, goes_back
from slimpipe.schedule.loan_cost import LoanBytes
from slimpipe.schedule.loans import Exchange, Loan
from slimpipe.schedule.plan import Shape
from slimpipe.schedule.slots import KINDS, Kind, Pasts, Slot
from slimpipe.schedule.work import Load, Work


def forward_bytes(exchange: Exchange, kv_share: Fraction = Fraction(1)) -> tuple[Fraction, ...]:
    """By rank, sent and received in the forwards' loans, a microbatch, in units of L M_h.

    M_h: one microbatch's hidden states, in bytes. As the paper counts (Eq. 2): a loan's query and partial output are a
    slice of hidden states each, its keys and values as much a token each, or `kv_share` of that with fewer KV heads
    than query heads. A unit runs L / (p v) layers. LSE, a few percent of the output, is left out.
    """
    shape, slice_tokens = exchange.slots.shape, exchange.slice_tokens
    slices = [Fraction(0)] * shape.p
    for loan in exchange.loans:
        if loan.slot.kind == "F":
            moved = 2 + 2 * kv_share * Fraction(loan.tokens, slice_tokens)
            slices[loan.owner] += moved
            slices[loan.helper] += moved
    return tuple(moved / (shape.n * shape.stages * shape.m) for moved in slices)


def pairwise_bound(shape: Shape, kv_share: Fraction = Fraction(1)) -> Fraction:
    """The paper's Eq. 2: what the busiest rank sends and receives at most in mode `pairwise`, as `forward_bytes`."""
    p, n = shape.p, shape.n
    moved = 2 * kv_share * (max(0, n - p + 1) * ((p - 1) // 2) + min(p - 1, n) * ((n - 1) // 2))
    return Fraction(2 * n + moved, n * p)


@dataclass(frozen=True)
class Balance:
    """One slot: the longest rank's time, and the shortest it could be if attention were cut and moved at will."""

    slot: Slot
    longest: float
    best: float


def balances(exchange: Exchange, work: Work) -> Iterator[Balance]:
    """Every slot's, in tokens of attention times their cost: dense work stays, attention to the past can move."""
    slots = exchange.slots
    for kind in KINDS:
        load = work.of(kind)
        for slot, pasts in slots.pasts(kind, work.slice_tokens):
            times = loads(pasts, load, exchange.by_slot.get(slot, ()))
            yield Balance(slot, max(times.values()), best(pasts, load))


def loads(pasts: Pasts, load: Load, loans: tuple[Loan, ...]) -> dict[int, float]:
    """By rank, its time in a slot of these loans: its own unit, less what it lends, and what others lend to it."""
    tokens: defaultdict[int, int] = defaultdict(int)
    for loan in loans:
        tokens[loan.owner] -= loan.tokens
        tokens[loan.helper] += loan.tokens
    return {
        rank: load.token * tokens[rank] if past is None else load.stays + load.token * (past + tokens[rank])
        for rank, past in enumerate(pasts)
    }


def best(pasts: Pasts, load: Load) -> float:
    """The longest rank's time if all attention to the past were spread evenly, by time, over all ranks."""
    busy = [past for past in pasts if past is not None]
    if not busy:
        return 0.0
    return max(load.stays, (len(busy) * load.stays + load.token * sum(busy)) / len(pasts))


def max_imbalance(exchange: Exchange, work: Work) -> float:
    """Over all slots, by how much the longest rank exceeds the best, in times of attention to one slice."""
    a_slice: dict[Kind, float] = {kind: work.of(kind).token * work.slice_tokens for kind in KINDS}
    return max((b.longest - b.best) / a_slice[b.slot.kind] for b in balances(exchange, work))


def buffer_bytes(exchange: Exchange, sizes: LoanBytes) -> tuple[int, ...]:
    """By rank, what it needs to receive into: the most that one layer of any slot asks for, kind by kind of buffer.

    Buffers are shared by all layers and slots, but the batches of one layer have their own.
    """
    most: list[dict[tuple[Kind, BatchName], int]] = [{} for _ in range(exchange.slots.shape.p)]
    for slot, loans in exchange.by_slot.items():
        for batch in batches(slot.kind, sizes.again):
            asked: defaultdict[int, int] = defaultdict(int)
            for loan in loans:
                asked[loan.owner if goes_back(batch) else loan.helper] += sizes.of(slot.kind, batch, loan.tokens)
            for rank, size in asked.items():
                most[rank][slot.kind, batch] = max(size, most[rank].get((slot.kind, batch), 0))
    return tuple(sum(buffers.values()) for buffers in most)


def pair_bytes(exchange: Exchange, sizes: LoanBytes) -> dict[tuple[int, int], int]:
    """By (sender, receiver), the most that one layer of any slot sends from one to the other."""
    most: dict[tuple[int, int], int] = {}
    for slot, loans in exchange.by_slot.items():
        sent: defaultdict[tuple[int, int], int] = defaultdict(int)
        for batch in batches(slot.kind, sizes.again):
            for loan in loans:
                pair = (loan.helper, loan.owner) if goes_back(batch) else (loan.owner, loan.helper)
                sent[pair] += sizes.of(slot.kind, batch, loan.tokens)
        for pair, size in sent.items():
            most[pair] = max(size, most.get(pair, 0))
    return most
