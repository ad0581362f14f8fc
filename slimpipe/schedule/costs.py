"""How long a forward or backward takes, and a transfer. Any unit of time serves, as long as all share it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from slimpipe.schedule.action import Action, Op, Unit
from slimpipe.schedule.plan import PlanError

Duration = Callable[[int, Unit], float]
"""(stage, unit) -> time."""


@dataclass(frozen=True)
class VocabularyCosts:
    """What embedding and output layer take for one slice.

    `loss`: output layer and loss in one piece, in the last stage's forward, of plans without vocabulary passes. The
    others: the passes S, T, E and D, on each rank; H and G only post, L costs next to nothing.
    """

    loss: float = 0.0
    statistics: float = 0.0
    gradient: float = 0.0
    embed: float = 0.0
    embed_grad: float = 0.0

    def __post_init__(self) -> None:
        if min(self.loss, self.statistics, self.gradient, self.embed, self.embed_grad) < 0:
            raise PlanError(f"{self}: must be >= 0")

    def of(self, op: Op) -> float:
        """Duration of a vocabulary pass."""
        return self._by_op.get(op, 0.0)

    @cached_property
    def _by_op(self) -> dict[Op, float]:
        return {
            Op.STATISTICS: self.statistics,
            Op.GRADIENT: self.gradient,
            Op.EMBED: self.embed,
            Op.EMBED_GRAD: self.embed_grad,
        }


def output_layer_costs(head: float, p: int, forward_only: bool = False) -> VocabularyCosts:
    """`head`: the whole output layer's forward for one slice, in the unit of the other costs.

    In one piece it takes three times that, three products of one size: the loss makes both gradients in the forward and
    keeps no logits. In passes each of p ranks has 1/p of the first product in S and 1/p of the other two in T. An
    evaluation (`forward_only`) has the first alone.
    """
    if forward_only:
        return VocabularyCosts(loss=head, statistics=head / p)
    return VocabularyCosts(loss=3 * head, statistics=head / p, gradient=2 * head / p)


@dataclass(frozen=True)
class Costs:
    """Durations of forwards, backwards and vocabulary passes."""

    forward: Duration
    backward: Duration
    vocabulary: VocabularyCosts = VocabularyCosts()

    def of(self, stage: int, compute: Action) -> float:
        return (self.forward if compute.op is Op.FORWARD else self.backward)(stage, compute.unit)


@dataclass(frozen=True)
class LinkCost:
    """A link's latency, its bandwidth in bytes per unit of time, and the bytes of the one tensor a unit sends.

    Slices are equal, so all tensors are. A link carries one tensor at a time; latency delays it without holding the
    link. Both directions between two ranks, and both kinds, are links of their own.
    """

    latency: float
    bandwidth: float
    tensor_bytes: int

    def __post_init__(self) -> None:
        if self.latency < 0 or self.bandwidth <= 0 or self.tensor_bytes < 0:
            raise PlanError(f"{self}: latency and tensor_bytes must be >= 0, bandwidth > 0")

    @property
    def holds(self) -> float:
        """How long one tensor holds the link."""
        return self.tensor_bytes / self.bandwidth


def equal_costs(forward: float = 1.0, backward: float = 2.0) -> Costs:
    """Every unit costs the same: what the published bubble formulas assume."""
    return Costs(lambda stage, unit: forward, lambda stage, unit: backward)


def sliced_costs(n: int, attention_share: float, attention_backward: float = 2.5) -> Costs:
    """Causal attention grows with the prefix: `attention_share` of the forward, in a whole microbatch, is attention.

    Slice i attends to i whole slices and, causally, to half of its own, so its attention costs i + 1/2 slices, n/2 on
    average. A forward takes 1 on average. Backward to forward: 2 in the dense part, `attention_backward` in attention:
    2.5, as it runs one of its two products again and makes four more, or more where the backward is slower.
    """
    if not 0 <= attention_share <= 1:
        raise PlanError(f"attention_share = {attention_share}: must lie between 0 and 1")
    dense = 1 - attention_share

    def attention(unit: Unit) -> float:
        return attention_share * (unit.slice + 0.5) / (n / 2)

    return Costs(
        forward=lambda stage, unit: dense + attention(unit),
        backward=lambda stage, unit: 2 * dense + attention_backward * attention(unit),
    )
