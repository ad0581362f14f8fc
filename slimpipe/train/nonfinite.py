"""What is said of a step whose loss or gradient is not finite: rank, parameter, and place in the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from slimpipe.parallel.gradients import BadGradients

_MOST_PLACES: Final = 3


@dataclass(frozen=True)
class BadStep:
    """What every rank knows of it, the same on all.

    `step` counts from 1; `places[i]` says where sequence i of its batch was taken from. `names`: the model's
    parameters, the embedding's first; `ranks[r]` refers to them by number. `where`: (sequence of the batch, slice's
    first token, its last) of the first loss that is not finite when the batch is run again, forward only; None where
    all are finite. Behind attention one bad token makes all of its slice bad.
    """

    step: int
    loss: float
    grad_norm: float
    names: Sequence[str]
    ranks: tuple[BadGradients, ...]
    where: tuple[int, int, int] | None
    places: tuple[str, ...]

    @property
    def first_bad(self) -> tuple[int, str] | None:
        """(rank, parameter) of the bad gradient that the backward pass reaches first; None where all are finite."""
        rank = max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].last)
        last = self.ranks[rank].last
        return None if last < 0 else (rank, self.names[last])

    def __str__(self) -> str:
        numbers = f"loss {self.loss:g}, gradient norm {self.grad_norm:g}"
        return f"{numbers}; {self._gradients()}; {self._data()}"

    def _gradients(self) -> str:
        first = self.first_bad
        if first is None:
            return "every gradient is finite by itself, and their squares overflow"
        rank, name = first
        hit = [str(rank) for rank, found in enumerate(self.ranks) if found.values]
        values, parameters = sum(found.values for found in self.ranks), sum(found.parameters for found in self.ranks)
        return (
            f"first bad parameter as the backward goes: {name} on rank {rank} ({values:,} bad gradient values in "
            f"{parameters} parameters, rank{'s' if len(hit) > 1 else ''} {', '.join(hit)})"
        )

    def _data(self) -> str:
        if self.where is None:
            listed = "; ".join(self.places[:_MOST_PLACES])
            more = len(self.places) - _MOST_PLACES
            return f"run again, its batch has finite losses ({listed}{f'; and {more} more' if more > 0 else ''})"
        sequence, start, last = self.where
        return f"the first bad loss is in tokens {start} to {last} of sequence {sequence} ({self.places[sequence]})"


class NonFinite(FloatingPointError):
    """A step's loss or gradient is not finite and the run has to stop. The same, at the same step, on every rank."""


def refusal(bad: BadStep) -> NonFinite:
    """For `train.on_nonfinite: stop`."""
    return NonFinite(
        f"step {bad.step}: {bad}. Weights and optimizer are those before the step. Look at the batch, lower optim.lr, "
        "or set train.on_nonfinite: skip"
    )


class Skips:
    """Counts skipped steps in a row, on every rank alike."""

    def __init__(self, most: int) -> None:
        self._most, self._in_a_row = most, 0

    def after(self, bad: BadStep | None) -> None:
        """Raises NonFinite where too many steps in a row were skipped."""
        if bad is None:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if self._in_a_row >= self._most:
            raise NonFinite(
                f"train.max_skips = {self._most}: so many steps in a row were skipped; step {bad.step}: {bad}. Resume "
                "from an earlier checkpoint with a lower optim.lr"
            )
