"""What a rank can be told to do: units, operations, and actions with a text form that round-trips.

A **unit** is (microbatch, slice, chunk): what one forward or one backward works on. `chunk` counts the model
chunks (virtual stages) of one rank, so a unit means something only together with a rank.

An **action** is an operation on a unit. Its token names it in plans, grids, errors and traces:

    F3.12@0      forward of microbatch 3, slice 12, chunk 0
    B3.12@0      its backward
    SF3.12@0>1   send the unit's output (an activation) to rank 1
    RF3.12@0<0   post the receive of the unit's input from rank 0; the unit's F waits for it
    SB3.12@0>0   send the gradient of the unit's input to rank 0
    RB3.12@0<1   post the receive of the gradient of the unit's output from rank 1; the unit's B waits for it

With attention context exchange (`schedule.balance`) a rank that is idle in a slot can help others there:

    XF3.12@0<2   compute what others lend in the slot in which rank 2 runs F3.12@0, the first of them
    XB3.12@0<2   the same in the slot of rank 2's B3.12@0

With vocabulary parallelism every rank also carries out, for every slice of every microbatch, these passes
(`schedule.vocabulary`). H, S, T and L name the last stage's chunk, E, G and D the first's, on whichever rank they run:

    E3.12@0      look up the tokens in the rank's rows of the embedding; post the reduce of that to the first rank
    H3.12@1      post the broadcast of the last stage's output
    S3.12@1      wait for it; logits of the rank's rows; post the all-gather of their statistics
    T3.12@1      wait for those; gradients of the logits and of the weight; post the reduce of the output's gradient
    G3.12@0      post the broadcast of the gradient of the embedding's output
    D3.12@0      wait for it, and add it into the rank's rows

A unit whose activations spend the time between F and B in host memory (`schedule.swap`) has three actions there:

    O3.12@0      offload: start copying the unit's activations to the host
    V3.12@0      vacate: compute waits for that copy, and their memory on the device is free
    R3.12@0      reload: take memory and start copying them back; the unit's B waits for it

An evaluation's plan (`schedule.forward_only`) has no B, and in place of T, G and D:

    L3.12@1      wait for the statistics; the losses of the slice's tokens
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple


class Op(str, Enum):
    """Operations. The value is the token's prefix."""

    FORWARD = "F"
    BACKWARD = "B"
    SEND_FORWARD = "SF"
    RECV_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECV_BACKWARD = "RB"
    HELP_FORWARD = "XF"
    HELP_BACKWARD = "XB"
    EMBED = "E"
    HIDDEN = "H"
    STATISTICS = "S"
    GRADIENT = "T"
    LOSS = "L"
    EMBED_GRAD_OUT = "G"
    EMBED_GRAD = "D"
    OFFLOAD = "O"
    VACATE = "V"
    RELOAD = "R"

    # Attributes, not properties: of a plan of a million actions each is asked dozens of times.
    is_compute: bool
    """Forward or backward of a unit's layers; vocabulary passes are counted apart."""
    goes_forward: bool
    """F, and what sends, receives or helps with it."""
    is_send: bool
    is_recv: bool
    is_transfer: bool
    is_help: bool
    """Attention lent by other ranks, where this one has nothing of its own to run."""
    is_vocabulary: bool
    is_swap: bool
    """A unit's activations on their way to host memory and back."""

    def __init__(self, token: str) -> None:
        self.is_compute = token in ("F", "B")
        self.goes_forward = token in ("F", "SF", "RF", "XF")
        self.is_send = token in ("SF", "SB")
        self.is_recv = token in ("RF", "RB")
        self.is_transfer = self.is_send or self.is_recv
        self.is_help = token in ("XF", "XB")
        self.is_vocabulary = token in ("E", "H", "S", "T", "L", "G", "D")
        self.is_swap = token in ("O", "V", "R")

    # Enum's own is written in Python, and plans of a million actions hash each of them several times.
    __hash__ = str.__hash__


class Unit(NamedTuple):
    """(microbatch, slice, chunk): the grain of scheduling. All count from 0; `chunk` is local to a rank."""

    microbatch: int
    slice: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.microbatch}.{self.slice}@{self.chunk}"


_TOKEN = re.compile(
    r"(F|B|SF|RF|SB|RB|XF|XB|[EHSTLGDOVR])(0|[1-9]\d*)\.(0|[1-9]\d*)@(0|[1-9]\d*)(?:([<>])(0|[1-9]\d*))?", re.ASCII
)


class _Fields(NamedTuple):
    op: Op
    unit: Unit
    peer: int | None = None


class Action(_Fields):
    """One entry of a rank's list. `peer`: the other rank of a transfer, the owner of what a helper does, else None.

    A tuple, and so is its unit, as these are hashed and compared most of all.
    """

    __slots__ = ()

    def __new__(cls, op: Op, unit: Unit, peer: int | None = None) -> Action:
        if (op.is_transfer or op.is_help) != (peer is not None):
            raise ValueError(f"action {op.value}{unit}: a transfer or a helper needs a peer and nothing else has one")
        return tuple.__new__(cls, (op, unit, peer))

    def __str__(self) -> str:
        if self.peer is None:
            return f"{self.op.value}{self.unit}"
        return f"{self.op.value}{self.unit}{'>' if self.op.is_send else '<'}{self.peer}"

    @classmethod
    def parse(cls, token: str) -> Action:
        """The action that prints as `token`. Raises ValueError for anything that would not print back the same."""
        match = _TOKEN.fullmatch(token)
        if match is None:
            raise ValueError(f"action token {token!r}: expected something like F3.12@0 or SF3.12@0>1")
        op, microbatch, slice_, chunk, _, peer = match.groups()
        unit = Unit(int(microbatch), int(slice_), int(chunk))
        action = cls(Op(op), unit, None if peer is None else int(peer))
        if str(action) != token:
            raise ValueError(f"action token {token!r}: did you mean {action}?")
        return action
