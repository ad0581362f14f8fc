"""Where a lane's tensors lie in its ring: both ends work it out alike, so that nothing but a count has to travel."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

ALIGNMENT: Final = 512
"""Bytes: any dtype may begin there, and copies are whole lines."""


@dataclass(frozen=True)
class Piece:
    """`size` bytes from byte `start` of the ring. `number` counts pieces; the ring's bytes there may be written once
    the pieces up to number `after` have been taken."""

    number: int
    start: int
    size: int
    after: int


class Ring:
    """Places pieces one behind the other; one that does not fit before the end begins at the start again.

    `capacity` in bytes, a multiple of ALIGNMENT. The first piece has number `first` + 1.
    """

    def __init__(self, capacity: int, first: int = 0) -> None:
        if capacity <= 0 or capacity % ALIGNMENT:
            raise ValueError(f"a ring of {capacity} bytes: must be a positive multiple of {ALIGNMENT}")
        self.capacity = capacity
        self._number = self._after = first
        self._end = 0
        # (number, begin) of pieces that nothing has been written over, in bytes since the ring began.
        self._live: deque[tuple[int, int]] = deque()

    def place(self, size: int) -> Piece:
        """The next piece. Raises ValueError where it is larger than the ring."""
        length = padded(size)
        if not 0 < length <= self.capacity:
            raise ValueError(f"a piece of {size} bytes in a ring of {self.capacity}")
        begin = self._end
        if begin % self.capacity + length > self.capacity:
            begin += self.capacity - begin % self.capacity
        self._end = begin + length
        self._number += 1
        while self._live and self._live[0][1] < self._end - self.capacity:
            self._after = self._live.popleft()[0]
        self._live.append((self._number, begin))
        return Piece(self._number, begin % self.capacity, size, self._after)


def padded(size: int) -> int:
    """`size` bytes rounded up to whole ALIGNMENTs."""
    return -(-size // ALIGNMENT) * ALIGNMENT
