"""What loans send, and in which order ranks post it (docs/exchange.md).

All of it goes over ONE communicator of all ranks. In every slot with loans, and there in every layer of the chunk, each
rank that lends or helps posts three batches, each a group of sends and receives that run at once:

| batch | forward                                | backward                                     | direction        |
|-------|----------------------------------------|----------------------------------------------|------------------|
| A     | K and V of the lent range              | K and V of the lent range                    | owner to helper  |
| B     | Q of the slice                         | Q, output, LSE and gradient of the output    | owner to helper  |
| C     | partial output and its LSE             | gradients of Q, and of the range's K and V   | helper to owner  |

Where backwards run attention again (`memory.recompute: full`) a loan of a backward serves both: behind A come the
forward's two, B' and C', with the same keys and values, and Q is not sent once more in B.

Ranks post in the order of slots, layers and batches, and in a batch in the order in which loans stand in the exchange.
Between two ranks transfers of a batch match by that order alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from slimpipe.schedule.action import Action
from slimpipe.schedule.loans import Exchange, Loan
from slimpipe.schedule.slots import Kind

BatchName = Literal["A", "B'", "C'", "B", "C"]

_PIECES: Final[Mapping[str, Mapping[BatchName, tuple[str, ...]]]] = MappingProxyType(
    {
        "F": {"A": ("K", "V"), "B": ("Q",), "C": ("out", "LSE")},
        "B": {"A": ("K", "V"), "B": ("Q", "out", "LSE", "dOut"), "C": ("dQ", "dK", "dV")},
        "B again": {
            "A": ("K", "V"),
            "B'": ("Q",),
            "C'": ("out", "LSE"),
            "B": ("out", "LSE", "dOut"),
            "C": ("dQ", "dK", "dV"),
        },
    }
)


def batches(kind: Kind, again: bool) -> Mapping[BatchName, tuple[str, ...]]:
    """The batches of one layer, with the tensors of one loan in each, all in the order of posting.

    `again`: backwards run attention's forward again.
    """
    return _PIECES["B again" if kind == "B" and again else kind]


def goes_back(batch: BatchName) -> bool:
    """Whether the batch goes from helper to owner."""
    return batch in ("C", "C'")


class Piece(NamedTuple):
    """One tensor of a loan in one layer, counted from the first that the slot's kind comes to."""

    loan: Loan
    layer: int
    batch: BatchName
    what: str

    @property
    def src(self) -> int:
        return self.loan.helper if goes_back(self.batch) else self.loan.owner

    @property
    def dst(self) -> int:
        return self.loan.owner if goes_back(self.batch) else self.loan.helper

    def __str__(self) -> str:
        return f"{self.what} of layer {self.layer}, {self.loan}"


class Posting(NamedTuple):
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
    loans = (*lent, *helped)
    for layer in range(layers):
        for batch, tensors in batches(loans[0].slot.kind, exchange.again).items():
            back = goes_back(batch)
            out, into = (helped, lent) if back else (lent, helped)
            yield Posting(
                layer,
                batch,
                tuple([Piece(loan, layer, batch, what) for loan in out for what in tensors]),
                tuple([Piece(loan, layer, batch, what) for loan in into for what in tensors]),
            )
