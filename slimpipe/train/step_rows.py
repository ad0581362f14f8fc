"""What each rank measured of a step, gathered: the same numbers on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slimpipe.runtime.clock import StepTime
from slimpipe.train.nonfinite import BadStep
from slimpipe.train.step_memory import peak_memory
from slimpipe.train.step_metrics import ExchangeMetrics, StepMetrics, SwapMetrics

if TYPE_CHECKING:
    from slimpipe.train.session import Session


@dataclass(frozen=True)
class StepRows:
    """`rows` [p, 3 + len(kinds)] float64 on the host: seconds, idle share, peak memory, and by kind of action the share
    that it waited for what it consumes. `exchanges`, `swaps`: for `ExchangeMetrics.of` and `SwapMetrics.of`."""

    kinds: tuple[str, ...]
    rows: Tensor
    exchanges: Tensor | None
    swaps: Tensor | None

    @classmethod
    def gather(cls, session: Session, time: StepTime) -> StepRows:
        """Of the step that `session` has just run, and that took `time`. Collective."""
        told_apart = (action.op for action in session.engine.actions)
        kinds = sorted({op.value for op in told_apart if not (op.is_transfer or op.is_help or op.is_swap)})
        if session.exchange is not None:
            kinds += ["exchange B", "exchange F"]
        # On a rank that moves nothing too: all ranks' rows are as long.
        kinds += ["R", "V"] if session.moving.units else []
        kinds += ["KV"] if session.moving.keys else []
        waited = [time.waits.get(kind, 0.0) / time.total for kind in kinds]
        mine = [time.total, time.idle_share, peak_memory(session), *waited]
        exchanged, swapped = _exchanged(session, time), _swapped(session, time)
        parts = (exchanged, swapped, mine)
        row = [value for part in parts for value in part]
        rows = session.gather(torch.tensor(row, dtype=torch.float64, device=session.carrier.memory))
        exchanges, swaps, rows = rows.split([len(part) for part in parts], dim=1)
        return cls(tuple(kinds), rows, exchanges if exchanged else None, swaps if swapped else None)

    def metrics(self, loss: float, grad_norm: float, lr: float, bad: BadStep | None) -> StepMetrics:
        rows = self.rows
        return StepMetrics(
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            seconds=float(rows[:, 0].max()),
            waits=dict(zip(self.kinds, rows[:, 3:].mean(0).tolist(), strict=True)),
            bubble=float(rows[:, 1].mean()),
            bubble_by_rank=tuple(rows[:, 1].tolist()),
            peak_memory_bytes=tuple(int(value) for value in rows[:, 2]),
            busy_seconds=tuple((rows[:, 0] * (1 - rows[:, 1])).tolist()),
            bad=bad,
            exchange=None if self.exchanges is None else ExchangeMetrics.of(self.exchanges),
            swap=None if self.swaps is None else SwapMetrics.of(self.swaps),
        )


def _exchanged(session: Session, time: StepTime) -> list[float]:
    """This rank's part of the exchange in a step, for `ExchangeMetrics.of`; nothing without exchange."""
    loans = session.engine.loans
    if loans is None:
        return []
    slots = list(time.waits_at.values())
    if session.trace is not None:
        for action, waited in time.waits_at.items():
            session.trace(f"rank {session.rank}: {action} waited {1e3 * waited:.2f} ms for its exchange")
    kinds = ("exchange F", "exchange B")
    exposed, under_way = (sum(found.get(kind, 0.0) for kind in kinds) for found in (time.waits, time.under_way))
    moved = loans.moved
    return [exposed, under_way, len(slots), max(slots, default=0.0), moved.sent, moved.received]


def _swapped(session: Session, time: StepTime) -> list[float]:
    """This rank's swaps of a step, for `SwapMetrics.of`; nothing where nothing is to move on any rank."""
    if not any(session.moving):
        return []
    units, keys = session.swaps, session.slot_streams
    moved = [0, 0, 0] if units is None else [units.moved_out, units.moved_in, units.kept]
    streamed = [0, 0] if keys is None else [keys.moved_out, keys.moved_in]
    pinned = sum(found.arenas.pinned for found in (units, keys) if found is not None)
    return [*(time.waits.get(kind, 0.0) for kind in ("V", "R", "KV")), *moved, pinned, *streamed]
