"""Which collectives the vocabulary passes post, over which communicator, and which action waits for each.

All ranks take part in every one. A communicator's collectives run in the order in which each rank posted them, so
that order must be the same on all ranks (docs/architecture.md, "NCCL order").

| posted by | communicator | what                                             | awaited by                      |
|-----------|--------------|--------------------------------------------------|---------------------------------|
| E         | embedding    | reduce of the looked-up embeddings to rank 0     | rank 0: F of the unit's chunk 0 |
| H         | output       | broadcast of the last stage's output             | S on every rank                 |
| S         | output       | all-gather of the logits' statistics             | T on every rank (evaluation: L) |
| T         | output       | reduce of that output's gradient to rank p-1     | rank p-1: B of the last chunk   |
| G         | embedding    | broadcast of the embedding's output's gradient   | D on every rank                 |
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from slimpipe.schedule.action import Action, Op, Unit
from slimpipe.schedule.plan import Shape

Communicator = Literal["output", "embedding"]
COMMUNICATORS: Final[tuple[Communicator, ...]] = ("output", "embedding")
_TRAINING: Final = (Op.EMBED, Op.HIDDEN, Op.STATISTICS, Op.GRADIENT, Op.EMBED_GRAD_OUT, Op.EMBED_GRAD)
_EVALUATION: Final = (Op.EMBED, Op.HIDDEN, Op.STATISTICS, Op.LOSS)

_COMMUNICATOR: Final[Mapping[Op, Communicator]] = MappingProxyType(
    {
        Op.EMBED: "embedding",
        Op.HIDDEN: "output",
        Op.STATISTICS: "output",
        Op.GRADIENT: "output",
        Op.EMBED_GRAD_OUT: "embedding",
    }
)
_WAITS_FOR: Final[Mapping[Op, Op]] = MappingProxyType(
    {
        Op.FORWARD: Op.EMBED,
        Op.STATISTICS: Op.HIDDEN,
        Op.GRADIENT: Op.STATISTICS,
        Op.LOSS: Op.STATISTICS,
        Op.BACKWARD: Op.GRADIENT,
        Op.EMBED_GRAD: Op.EMBED_GRAD_OUT,
    }
)
_WHAT: Final[Mapping[Op, str]] = MappingProxyType(
    {
        Op.EMBED: "reduce of the embeddings",
        Op.HIDDEN: "broadcast of the last stage's output",
        Op.STATISTICS: "all-gather of the logits' statistics",
        Op.GRADIENT: "reduce of the gradient of the last stage's output",
        Op.EMBED_GRAD_OUT: "broadcast of the gradient of the embeddings",
    }
)


class Collective(NamedTuple):
    """What every rank posts in its pass `op` of a slice."""

    op: Op
    microbatch: int
    slice: int

    @property
    def communicator(self) -> Communicator:
        return _COMMUNICATOR[self.op]

    def __str__(self) -> str:
        return f"{_WHAT[self.op]} of microbatch {self.microbatch}, slice {self.slice}"


def passes_of(forward_only: bool) -> tuple[Op, ...]:
    """The passes that every rank carries out for each slice, in training or in an evaluation."""
    return _EVALUATION if forward_only else _TRAINING


def chunk_of(shape: Shape, op: Op) -> int:
    """The chunk that a vocabulary pass names: the embedding stands before stage 0, the output layer behind the last."""
    return 0 if op in (Op.EMBED, Op.EMBED_GRAD_OUT, Op.EMBED_GRAD) else shape.v - 1


def posted_by(action: Action) -> Collective | None:
    """The collective that a rank posts in this action."""
    if action.op not in _COMMUNICATOR:
        return None
    return Collective(action.op, action.unit.microbatch, action.unit.slice)


def poster(shape: Shape, collective: Collective) -> Action:
    """The action that posts it, on every rank."""
    op = collective.op
    return Action(op, Unit(collective.microbatch, collective.slice, chunk_of(shape, op)))


def awaited_by(shape: Shape, rank: int, action: Action) -> Collective | None:
    """The collective that an action of this rank waits for, in a plan with vocabulary passes."""
    op, unit = action.op, action.unit
    waits_for = _WAITS_FOR.get(op)
    if waits_for is None:
        return None
    if op is Op.FORWARD and shape.stage(rank, unit.chunk) != 0:
        return None
    if op is Op.BACKWARD and shape.stage(rank, unit.chunk) != shape.last_stage:
        return None
    return Collective(waits_for, unit.microbatch, unit.slice)


def sends_output_of(shape: Shape, rank: int, action: Action) -> Action | None:
    """The forward or backward of this rank whose output it sends round in this H or G; None on the other ranks."""
    if action.op is Op.HIDDEN and rank == shape.p - 1:
        return Action(Op.FORWARD, action.unit)
    if action.op is Op.EMBED_GRAD_OUT and rank == 0:
        return Action(Op.BACKWARD, action.unit)
    return None


def contributes(shape: Shape, rank: int, action: Action) -> bool:
    """Whether this rank adds to a reduce in the action without getting its result."""
    if action.op is Op.EMBED:
        return rank != 0
    return action.op is Op.GRADIENT and rank != shape.p - 1
