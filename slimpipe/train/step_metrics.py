"""What is measured of one optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from slimpipe.train.nonfinite import BadStep


@dataclass(frozen=True)
class StepMetrics:
    """One step's numbers, the same on every rank."""

    loss: float
    grad_norm: float
    lr: float
    seconds: float
    """The slowest rank's."""
    waits: dict[str, float]
    """Measured share of the step spent waiting, by what waits: a kind of action (F, B, S, ...) for what it consumes, or
    the exchange within it; averaged over ranks."""
    bubble: float
    """Measured share of the step in which a rank's compute was idle, averaged over ranks."""
    bubble_by_rank: tuple[float, ...]
    peak_memory_bytes: tuple[int, ...]
    """By pipeline rank; device memory on a GPU, resident memory on the CPU."""
    busy_seconds: tuple[float, ...]
    """By pipeline rank: what its compute took."""
    bad: BadStep | None = None
    """Of a step whose update was left out, as `train.on_nonfinite: skip` asks for."""
    exchange: ExchangeMetrics | None = None
    swap: SwapMetrics | None = None


@dataclass(frozen=True)
class ExchangeMetrics:
    """The attention exchange of one step. Seconds are summed over a rank's slots and averaged over ranks."""

    exposed_s: float
    """Ranks waited so long for transfers or for helpers."""
    under_way_s: float | None
    """Transfers were under way so long, from post to end, waits for the other side included; None on a CPU."""
    overlap: float | None
    """Share of `under_way_s` that lay under compute."""
    slot_mean_s: float
    slot_max_s: float
    """Exposed in one slot of one rank: on average over slots with loans, and at worst."""
    sent_bytes: tuple[int, ...]
    received_bytes: tuple[int, ...]

    @classmethod
    def of(cls, rows: Tensor) -> ExchangeMetrics:
        """rows [p, 6] float64: exposed and under way in seconds, slots, worst slot, bytes sent and received."""
        exposed, under_way = float(rows[:, 0].mean()), float(rows[:, 1].mean())
        slots = float(rows[:, 2].sum())
        return cls(
            exposed,
            under_way or None,
            1 - exposed / under_way if under_way else None,
            float(rows[:, 0].sum()) / slots if slots else 0.0,
            float(rows[:, 3].max()),
            tuple(int(value) for value in rows[:, 4]),
            tuple(int(value) for value in rows[:, 5]),
        )


@dataclass(frozen=True)
class SwapMetrics:
    """Swaps of one step. Seconds are summed over a rank's actions and averaged over ranks; lists are by rank."""

    exposed_s: float
    """Compute waited so long for copies: out, before their memory was used again (V), and back (R); and of keys and
    values (KV)."""
    exposed_out_s: float
    exposed_back_s: float
    exposed_kv_s: float
    out_bytes: tuple[int, ...]
    back_bytes: tuple[int, ...]
    kept_bytes: tuple[int, ...]
    """Meant to move, and kept on the device for want of host memory."""
    pinned_bytes: tuple[int, ...]
    """Of host memory, for all that moves."""
    kv_out_bytes: tuple[int, ...]
    """Keys, values and their gradients, where they stream; `out_bytes` and `back_bytes` are activations alone."""
    kv_back_bytes: tuple[int, ...]

    @classmethod
    def of(cls, rows: Tensor) -> SwapMetrics:
        """rows [p, 9] float64: seconds exposed out, back and for keys and values; bytes out, back, kept and pinned, and
        of keys and values out and back."""
        out, back, keys = (float(rows[:, column].mean()) for column in range(3))
        bytes = (tuple(int(value) for value in rows[:, column]) for column in range(3, 9))
        return cls(out + back + keys, out, back, keys, *bytes)
