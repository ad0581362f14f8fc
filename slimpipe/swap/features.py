"""How a saved tensor is known again in the next step: by what it is and where it comes, never by its address.

No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Feature(NamedTuple):
    """`operator`: number of the operator that saved it, -1 where that is not known."""

    shape: tuple[int, ...]
    dtype: object
    nbytes: int
    operator: int


def alike(a: Feature, b: Feature) -> bool:
    """The same place in the program, though perhaps another batch or length."""
    return a.dtype == b.dtype and a.operator == b.operator and len(a.shape) == len(b.shape)


@dataclass
class Matcher:
    """Follows a known sequence: each new feature gets the number it has there.

    An exact match is looked for first, up to `window` places ahead (tensors that were skipped), then one that is only
    alike at the very next place (a short batch). Neither: the feature is an insertion, has no number, and the place
    stays.
    """

    expected: Sequence[Feature]
    window: int = 32

    def __post_init__(self) -> None:
        self.place = self.exact = self.loose = self.unmatched = 0

    def match(self, feature: Feature) -> int | None:
        ahead = self.expected[self.place : self.place + self.window]
        for offset, candidate in enumerate(ahead):
            if candidate == feature:
                # Far jumps by features that occur all over would skip most of the sequence.
                if offset and alike(ahead[0], feature):
                    break
                self.place += offset + 1
                self.exact += 1
                return self.place - 1
        if ahead and alike(ahead[0], feature):
            self.place += 1
            self.loose += 1
            return self.place - 1
        self.unmatched += 1
        return None
