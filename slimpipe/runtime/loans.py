"""What a rank lends and helps with in each action of its list, from the plan's exchange (schedule.balance)."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

from slimpipe.kernels.attention import AttentionBackend
from slimpipe.runtime.clock import Clock
from slimpipe.runtime.exchange import (
    Buffers,
    ExchangeTraffic,
    Helped,
    Kept,
    LayerExchange,
    Lent,
    Range,
    Shapes,
    TrafficCount,
)
from slimpipe.schedule import Action, Exchange, Loan


class Loans:
    """Makes the `LayerExchange` of an action. `keep`: helpers hold K and V until the backward where its loans are the
    forward's (pipeline.exchange_keep: kv). `buffers`: those of another's, to use in turn with it."""

    def __init__(
        self,
        plan: Exchange,
        rank: int,
        traffic: ExchangeTraffic,
        backend: AttentionBackend,
        clock: Clock,
        keep: bool,
        buffers: Buffers | None = None,
    ) -> None:
        self.plan, self.traffic, self._rank, self._keep = plan, traffic, rank, keep
        self._backend, self._clock = backend, clock
        self.buffers, self._kept = buffers or Buffers(), Kept()
        self.moved = TrafficCount()
        self._both = _in_both_slots(plan.loans) if keep else frozenset()
        self.shapes: Shapes | None = None

    def of(self, action: Action) -> LayerExchange | None:
        """The loans of an F, B, XF or XB; None where no loan concerns the rank in it."""
        lent, helped = self.plan.lent_in(self._rank, action), self.plan.helped_in(self._rank, action)
        if not (lent or helped):
            return None
        assert self.shapes is not None, "the warm-up tells the shapes"
        return LayerExchange(
            [Lent(loan.helper, loan.range, keys=self._sends_keys(loan)) for loan in lent],
            [
                Helped(loan.owner, loan.tokens, self._sends_keys(loan), _name(loan) if self._is_kept(loan) else None)
                for loan in helped
            ],
            self.traffic,
            self.buffers,
            self._kept,
            self._backend,
            self._clock,
            self.shapes,
            (lent or helped)[0].slot.kind,
            str(action),
            self.moved,
            again=self.plan.again and (lent or helped)[0].slot.kind == "B",
        )

    def lent_ranges(self, action: Action) -> list[Range]:
        """What the rank lends in an action."""
        return [loan.range for loan in self.plan.lent_in(self._rank, action)]

    def helped_lengths(self, action: Action) -> set[int]:
        """Tokens of each range with which the rank helps in an action."""
        return {loan.tokens for loan in self.plan.helped_in(self._rank, action)}

    def warm_up(self, query: torch.Size, keys: Tensor, actions: Iterable[Action]) -> None:
        """Learns the shapes of a layer's attention and takes the buffers for `actions`, the rank's list; then each pair
        of ranks with a loan meets once, in one order, and compares these shapes.

        NCCL connects two ranks at their first transfer, with allocations that can wait for the device. Raises
        ValueError on both ranks of a pair whose layers attend in unlike shapes or dtypes.
        """
        b, s, heads, d = query
        self.shapes = Shapes(b, s, heads, keys.shape[2], d, keys.dtype, keys.device)
        for exchange in map(self.of, actions):
            if exchange is not None:
                exchange.reserve()
        own = torch.tensor([_digest(self.shapes)], device=keys.device)
        found: dict[int, Tensor] = {}
        pairs = sorted({(min(loan.owner, loan.helper), max(loan.owner, loan.helper)) for loan in self.plan.loans})
        for pair in pairs:
            if self._rank in pair:
                (peer,) = set(pair) - {self._rank}
                found[peer] = torch.zeros_like(own)
                self.traffic.post([(own, peer)], [(found[peer], peer)]).wait()
        for peer, theirs in found.items():
            if not torch.equal(theirs, own):
                raise ValueError(
                    f"pipeline.exchange = {self.plan.mode}: layers of rank {peer} attend in other shapes or dtypes "
                    f"than those of rank {self._rank}; set it to off"
                )

    def begin(self) -> None:
        """Starts a step; what a step that failed has left is let go."""
        self._kept.clear()
        self.moved.sent = self.moved.received = 0

    def left_over(self) -> int:
        """Keys still held: none at the end of a sound step."""
        return len(self._kept)

    def _is_kept(self, loan: Loan) -> bool:
        """An evaluation has no backward to keep for."""
        return torch.is_grad_enabled() and _name(loan) in self._both

    def _sends_keys(self, loan: Loan) -> bool:
        return loan.slot.kind == "F" or not self._is_kept(loan)


def _digest(shapes: Shapes) -> int:
    """Of what two ranks must have in common."""
    return zlib.crc32(repr((shapes.b, shapes.s, shapes.heads, shapes.kv_heads, shapes.d, shapes.dtype)).encode())


def _name(loan: Loan) -> tuple[object, ...]:
    """The same for a loan and its like in the unit's other slot."""
    return loan.owner, loan.unit, loan.helper, loan.start, loan.stop


def _in_both_slots(loans: Iterable[Loan]) -> frozenset[tuple[object, ...]]:
    """Loans that a unit makes in its forward and again, range and helper alike, in its backward."""
    by_kind: dict[str, set[tuple[object, ...]]] = {"F": set(), "B": set()}
    for loan in loans:
        by_kind[loan.slot.kind].add(_name(loan))
    return frozenset(by_kind["F"] & by_kind["B"])
