"""What a unit's forward and backward consist of, as the balance pass sees them (docs/exchange.md).

A unit's time is its dense part, which stays where the weights are; attention to its own slice, causal, which stays
too; and attention to its past, so much a token, which any rank can do. All units have the same, but for the length of
their past. Any unit of time serves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from slimpipe.schedule.action import Unit
from slimpipe.schedule.costs import Costs
from slimpipe.schedule.plan import PlanError
from slimpipe.schedule.slots import Kind


@dataclass(frozen=True)
class Load:
    """Of one unit's forward or backward. `token`: attention to one token of the past, by the whole slice."""

    dense: float
    own: float
    token: float

    def __post_init__(self) -> None:
        if min(self.dense, self.own) < 0 or self.token <= 0:
            raise PlanError(f"{self}: dense and own must be >= 0, token > 0")

    @property
    def stays(self) -> float:
        """What no other rank can do."""
        return self.dense + self.own


@dataclass(frozen=True)
class Work:
    """Loads of every unit, for slices of `slice_tokens` tokens."""

    forward: Load
    backward: Load
    slice_tokens: int
    again: Load | None = None
    """Where backwards run their attention's forward once more: the part of `backward` that is forward. Else None."""

    def of(self, kind: Kind) -> Load:
        return self.forward if kind == "F" else self.backward

    def mean_forward(self, n: int) -> float:
        """A forward's time, on average over the n slices of a sequence."""
        return self.forward.stays + self.forward.token * self.slice_tokens * (n - 1) / 2

    def with_attention_share(self, n: int, share: float) -> Work:
        """The same mean forward, of which attention is `share`; backwards in the same ratio to their forwards."""
        _refuse_share(share)
        mean = self.mean_forward(n)
        attention = share * mean / (mean - self.forward.dense)
        dense = (1 - share) * mean / self.forward.dense

        def scaled(load: Load) -> Load:
            return Load(dense * load.dense, attention * load.own, attention * load.token)

        again = None if self.again is None else scaled(self.again)
        return Work(scaled(self.forward), scaled(self.backward), self.slice_tokens, again)

    def scaled(self, by: float) -> Work:
        """The same in another unit of time."""

        def scaled(load: Load) -> Load:
            return Load(by * load.dense, by * load.own, by * load.token)

        again = None if self.again is None else scaled(self.again)
        return replace(self, forward=scaled(self.forward), backward=scaled(self.backward), again=again)

    def recomputing(self, dense: float, attention: bool) -> Work:
        """The same, where backwards do this part of their forward's dense work once more, and its attention or not."""
        dense_again = dense * self.forward.dense
        if not attention:
            return replace(self, backward=replace(self.backward, dense=self.backward.dense + dense_again))
        again = replace(self.forward, dense=dense_again)
        backward = Load(
            self.backward.dense + again.dense, self.backward.own + again.own, self.backward.token + again.token
        )
        return replace(self, backward=backward, again=again)

    def costs(self) -> Costs:
        """The same without exchange, for the simulator."""

        def time(load: Load, unit: Unit) -> float:
            return load.stays + load.token * self.slice_tokens * unit.slice

        return Costs(lambda stage, unit: time(self.forward, unit), lambda stage, unit: time(self.backward, unit))


def sliced_work(n: int, attention_share: float, slice_tokens: int) -> Work:
    """`attention_share` of the forward, in a whole microbatch, is attention; a forward takes 1 on average.

    As `costs.sliced_costs`: a slice's own attention costs half of what it costs to attend to another slice. Backward to
    forward: 2 in the dense part, 2.5 in attention.
    """
    _refuse_share(attention_share)
    a_slice = attention_share / (n / 2)
    forward = Load(1 - attention_share, a_slice / 2, a_slice / slice_tokens)
    backward = Load(2 * forward.dense, 2.5 * forward.own, 2.5 * forward.token)
    return Work(forward, backward, slice_tokens)


def _refuse_share(share: float) -> None:
    if not 0 < share <= 1:
        raise PlanError(f"attention_share = {share}: exchange needs attention to share, above 0, at most 1")
