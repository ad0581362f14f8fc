"""Permutations of any length without a table of them."""

from __future__ import annotations

import hashlib
import struct
from typing import Final

# Four rounds of a Feistel network pass for random (Luby and Rackoff, 1988); more are cheap, and small ranges need them.
_ROUNDS: Final = 8
_MASK: Final = 2**64 - 1


class Permutation:
    """A bijection of 0 .. count - 1, drawn by `key`: element by element, in constant memory.

    A Feistel network over the next power of four; where it leaves the range it is applied again until it is back. Its
    numbers are fixed by blake2b and splitmix64's mixing alone, the same in every version of every library.
    """

    def __init__(self, count: int, key: str) -> None:
        """Raises ValueError unless count > 0."""
        if count < 1:
            raise ValueError(f"a permutation of {count} elements: must be 1 or more")
        self.count = count
        self._half = max(1, ((count - 1).bit_length() + 1) // 2)  # bits
        digest = hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = struct.unpack(f"<{_ROUNDS}Q", digest)

    def __call__(self, position: int) -> int:
        """The element at `position`, both in 0 .. count - 1."""
        half, mask = self._half, (1 << self._half) - 1
        value = position
        while True:
            left, right = value >> half, value & mask
            for key in self._keys:
                left, right = right, left ^ (_mix(right + key) & mask)
            value = left << half | right
            if value < self.count:
                return value


def _mix(x: int) -> int:
    x &= _MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)
