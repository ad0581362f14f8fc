"""A plan: every rank's list of actions, and the shape they were made for.

Symbols are the paper's: `p` pipeline ranks, `v` virtual stages (chunks) a rank, `n` slices a sequence,
`m` microbatches. Stage `g = c p + r` is chunk `c` of rank `r`; a microbatch's slice passes stages 0 .. p v - 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from slimpipe.schedule.action import Action, Op, Unit


class PlanError(ValueError):
    """A plan or its shape is wrong. The message names the rank, the action and its place, or the value to change."""


@dataclass(frozen=True)
class Shape:
    """p ranks, v chunks a rank, n slices a sequence, m microbatches a step."""

    p: int
    v: int = 1
    n: int = 1
    m: int = 1

    def __post_init__(self) -> None:
        for name, what in (("p", "pipeline ranks"), ("v", "virtual stages"), ("n", "slices"), ("m", "microbatches")):
            value = getattr(self, name)
            if value < 1:
                raise PlanError(f"{name} = {value} ({what}): must be at least 1")

    @property
    def stages(self) -> int:
        return self.p * self.v

    @cached_property
    def last_stage(self) -> int:
        return self.stages - 1

    @property
    def units(self) -> int:
        """Units a rank works on in a step: m n v."""
        return self.m * self.n * self.v

    def stage(self, rank: int, chunk: int) -> int:
        return chunk * self.p + rank

    def place(self, stage: int) -> tuple[int, int]:
        """(rank, chunk) of a stage."""
        return stage % self.p, stage // self.p


@dataclass(frozen=True)
class Plan:
    """`ranks[r]` is rank r's list of actions in the order in which the engine carries them out."""

    name: str
    shape: Shape
    ranks: tuple[tuple[Action, ...], ...]

    @cached_property
    def is_lowered(self) -> bool:
        """Whether sends and receives are actions of the plan. One rank sends nothing, lowered or not."""
        return any(a.op.is_send or a.op.is_recv for actions in self.ranks for a in actions)

    @cached_property
    def has_vocabulary(self) -> bool:
        """Whether the vocabulary passes are actions of the plan; else the last stage's forwards make the loss."""
        return any(a.op.is_vocabulary for actions in self.ranks for a in actions)

    @cached_property
    def has_help(self) -> bool:
        """Whether idle ranks' help with attention is actions of the plan."""
        return any(a.op.is_help for actions in self.ranks for a in actions)

    @cached_property
    def has_swap(self) -> bool:
        """Whether units' ways to host memory and back are actions of the plan."""
        return any(a.op.is_swap for actions in self.ranks for a in actions)

    def compute(self, rank: int) -> tuple[Action, ...]:
        """Rank's forwards and backwards alone, without transfers and vocabulary passes."""
        return tuple(a for a in self.ranks[rank] if a.op.is_compute)

    def producer(self, rank: int, action: Action) -> tuple[int, Unit] | None:
        """(rank, unit) whose output a forward or backward consumes; None where it starts from data or from the loss.

        Within a rank a backward also needs its own forward; that is not what this returns.
        """
        stage = self.shape.stage(rank, action.unit.chunk)
        source = stage - 1 if action.op is Op.FORWARD else stage + 1
        if not 0 <= source < self.shape.stages:
            return None
        source_rank, chunk = self.shape.place(source)
        return source_rank, Unit(action.unit.microbatch, action.unit.slice, chunk)
