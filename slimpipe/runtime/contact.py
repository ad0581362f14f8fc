"""What a rank says when a transfer fails because its peer has failed or is gone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class LostContact(RuntimeError):
    """A transfer failed. `whom` names the pipeline ranks on its other side, one of which has failed or is gone."""

    def __init__(self, ranks: Sequence[int], what: str, error: RuntimeError) -> None:
        self.whom = f"rank {ranks[0]}" if len(ranks) == 1 else f"one of ranks {', '.join(map(str, ranks))}"
        super().__init__(f"{what} with {self.whom}: {error}")


@contextmanager
def contact_with(ranks: Sequence[int], what: str) -> Iterator[None]:
    """Turns a transfer's RuntimeError into LostContact with these ranks; `what` names the transfer."""
    try:
        yield
    except RuntimeError as error:
        raise LostContact(ranks, what, error) from error
