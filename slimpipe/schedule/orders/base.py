"""What every compute order is: one-forward-one-backward (1F1B) over some list of units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from slimpipe.schedule.action import Action, Unit
from slimpipe.schedule.plan import Shape


class Order(Protocol):
    """A schedule as three things: the order of forwards, the order of backwards, each rank's warm-up."""

    @property
    def name(self) -> str: ...

    def forwards(self, shape: Shape) -> list[Unit]: ...

    def backwards(self, shape: Shape) -> list[Unit]: ...

    def warmup(self, shape: Shape, rank: int) -> int:
        """Forwards before the first backward's pair. May exceed the number of forwards: then all come first."""

    def refusal(self, shape: Shape) -> str | None:
        """Why the schedule cannot run this shape and which setting to change; None where it can."""


def one_forward_one_backward(
    forwards: Sequence[Action], backwards: Sequence[Action], warmup: int
) -> tuple[Action, ...]:
    """`warmup` forwards, then forward-backward pairs while forwards last, then the remaining backwards."""
    steady = forwards[warmup:]
    pairs = [action for pair in zip(steady, backwards, strict=False) for action in pair]
    return (*forwards[:warmup], *pairs, *backwards[len(steady) :])
