"""Which tensors travel between stages, and over which directed links.

A stage's forward makes the activation that the next stage consumes; its backward makes the gradient that the
stage before consumes. Each such tensor has one maker and one consumer, so (kind, making stage, microbatch, slice)
identifies it on both sides of a transfer. Between chunks of one rank (p = 1) nothing travels.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from slimpipe.schedule.action import Action, Op
from slimpipe.schedule.plan import Plan, Shape

Kind = Literal["F", "B"]
"""F: activations, towards later stages. B: gradients, towards earlier ones."""


class Tensor(NamedTuple):
    """What the forward (F) or backward (B) of `stage` makes for its neighbour."""

    kind: Kind
    stage: int
    microbatch: int
    slice: int

    def __str__(self) -> str:
        what = "activation" if self.kind == "F" else "gradient"
        return f"{what} of microbatch {self.microbatch}, slice {self.slice} out of stage {self.stage}"


class Link(NamedTuple):
    """One direction between two ranks for one kind. With v > 1 the wrap p-1 -> 0 (F) and 0 -> p-1 (B) is one too."""

    kind: Kind
    src: int
    dst: int

    def __str__(self) -> str:
        return f"{self.kind} {self.src}>{self.dst}"


def kind_of(op: Op) -> Kind:
    return "F" if op.goes_forward else "B"


def output_of(shape: Shape, rank: int, compute: Action) -> Tensor | None:
    """The tensor that a forward or backward makes for another stage; None at the pipeline's ends."""
    microbatch, slice_, chunk = compute.unit
    stage = chunk * shape.p + rank
    if compute.op.goes_forward:
        return Tensor("F", stage, microbatch, slice_) if 0 <= stage < shape.last_stage else None
    return Tensor("B", stage, microbatch, slice_) if 0 < stage <= shape.last_stage else None


def input_of(shape: Shape, rank: int, compute: Action) -> Tensor | None:
    """The tensor of another stage that a forward or backward consumes; None at the pipeline's ends."""
    microbatch, slice_, chunk = compute.unit
    stage = chunk * shape.p + rank
    if compute.op.goes_forward:
        return Tensor("F", stage - 1, microbatch, slice_) if 0 < stage <= shape.last_stage else None
    return Tensor("B", stage + 1, microbatch, slice_) if 0 <= stage < shape.last_stage else None


def carried(shape: Shape, rank: int, transfer: Action) -> Tensor | None:
    """The tensor that a send or receive carries; None where there is no such tensor (a stage past an end)."""
    of = output_of if transfer.op.is_send else input_of
    return of(shape, rank, transfer)


def link_of(rank: int, transfer: Action) -> Link:
    """The directed link that a send or receive of `rank` uses."""
    if transfer.peer is None:
        raise ValueError(f"{transfer}: not a transfer")
    kind = kind_of(transfer.op)
    return Link(kind, rank, transfer.peer) if transfer.op.is_send else Link(kind, transfer.peer, rank)


def ends(shape: Shape, tensor: Tensor) -> tuple[int, int]:
    """(making rank, consuming rank) of a tensor."""
    consumer = tensor.stage + 1 if tensor.kind == "F" else tensor.stage - 1
    return tensor.stage % shape.p, consumer % shape.p


def send_after(shape: Shape, rank: int, compute: Action) -> Action | None:
    """The send that takes a compute action's output to another rank; None where it stays or ends here."""
    if shape.p == 1 or output_of(shape, rank, compute) is None:
        return None
    if compute.op.goes_forward:
        return Action(Op.SEND_FORWARD, compute.unit, (rank + 1) % shape.p)
    return Action(Op.SEND_BACKWARD, compute.unit, (rank - 1) % shape.p)


def receive_before(shape: Shape, rank: int, compute: Action) -> Action | None:
    """The receive that brings a compute action's input from another rank; None where it needs none."""
    if shape.p == 1 or input_of(shape, rank, compute) is None:
        return None
    if compute.op.goes_forward:
        return Action(Op.RECV_FORWARD, compute.unit, (rank - 1) % shape.p)
    return Action(Op.RECV_BACKWARD, compute.unit, (rank + 1) % shape.p)


def links(plan: Plan) -> tuple[Link, ...]:
    """Every directed link that the plan's compute order uses, in one global order: all ranks that create
    communicators must walk the same list (docs/architecture.md, "NCCL order")."""
    used = set()
    for rank in range(plan.shape.p):
        for compute in plan.compute(rank):
            receive = receive_before(plan.shape, rank, compute)
            if receive is not None:
                used.add(link_of(rank, receive))
    return tuple(sorted(used))
