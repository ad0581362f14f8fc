"""What loans send, and in which order ranks post it (DESIGN sections 4 and 8).

All of it goes over ONE communicator of all ranks. In every slot with loans, and there in every layer of the chunk, each
rank that lends or helps posts three batches, each a group of sends and receives that run at once:

| batch | forward                                | backward                                     | direction        |
|-------|----------------------------------------|----------------------------------------------|------------------|
| A     | K and V of the lent range              | K and V of the lent range                    | owner to helper  |
| B     | Q of the slice                         | Q, output, LSE and gradient of the output    | owner to helper  |
| C     | partial output and its LSE             | gradients of Q, and of the range's K and V   | helper to owner  |

Ranks post in the order of slots, layers and batches, and in a batch in the order in which loans stand in the exchange.
Between two ranks transfers of a batch match by that order alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from slimpipe.schedule.action import Action
from slimpipe.schedule.loans import Exchange, Loan
from slimpipe.schedule.slots import Kind

BatchName = Literal["A", "B", "C"]
BATCHES: Final[tuple[BatchName, ...]] = ("A", "B", "C")

PIECES: Final[Mapping[tuple[Kind, BatchName], tuple[str, ...]]] = MappingProxyType(
    {
        ("F", "A"): ("K", "V"),
        ("F", "B"): ("Q",),
        ("F", "C"): ("out", "LSE"),
        ("B", "A"): ("K", "V"),
        ("B", "B"): ("Q", "out", "LSE", "dOut"),
        ("B", "C"): ("dQ", "dK", "dV"),
    }
)
"""The tensors of one loan in a batch, in the order of posting."""


class Piece(NamedTuple):
    """One tensor of a loan in one layer, counted from the first that the slot's kind comes to."""

    loan: Loan
    layer: int
    batch: BatchName
    what: str

    @property
    def src(self) -> int:
        return self.loan.helper if self.batch == "C" else self.loan.owner

    @property
    def dst(self) -> int:
        return self.loan.owner if self.batch == "C" else self.loan.helper

    def __str__(self) -> str:
        return f"{self.what} of layer {self.layer}, {self.loan}"


@dataclass(frozen=True)
class Posting:
    """One rank's batch: what it sends, then what it receives."""

    layer: int
    batch: BatchName
    sends: tuple[Piece, ...]
    receives: tuple[Piece, ...]


def postings(exchange: Exchange, rank: int, action: Action, layers: int) -> Iterator[Posting]:
    """What a rank posts in an F, B, XF or XB of its list, batch by batch. Nothing where no loan concerns it."""
    lent, helped = exchange.lent_in(rank, action), exchange.helped_in(rank, action)
    if not (lent or helped):
        return
    for layer in range(layers):
        for batch in BATCHES:
            pieces = [
                Piece(loan, layer, batch, what) for loan in (*lent, *helped) for what in PIECES[loan.slot.kind, batch]
            ]
            yield Posting(
                layer,
                batch,
                tuple(piece for piece in pieces if piece.src == rank),
                tuple(piece for piece in pieces if piece.dst == rank),
            )
