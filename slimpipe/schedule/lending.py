"""Which stretch of an owner's past each helper gets.

A loan is one range of the KV buffer inside one range of the past, so that it is one kernel call and one piece of
memory. The rest of the past should be few ranges too, and lie beside the unit's own slot: some attention kernels take
past and own slice in one call where they lie in order. So loans are cut from the ends that are far from the own slot.
"""

from __future__ import annotations

from collections.abc import Sequence

Range = tuple[int, int]
"""Half-open."""


def cut(past: Sequence[Range], own: int, amounts: Sequence[int]) -> list[list[Range]]:
    """Disjoint ranges of these lengths out of `past` (ascending, disjoint), which holds as much as that in all.

    `own`: where the unit's own slot starts. Each amount is one range; two only where no range of the past has so much
    left, which takes a past in two ranges and n < 2p.
    """
    if len(past) == 1:
        return _from_one(past[0], own, amounts)
    # Far ranges are lent first. Within one, what is left stays at its near end.
    left = sorted(past, key=lambda piece: -abs(piece[0] - own))
    cuts: list[list[Range]] = [[] for _ in amounts]
    for index in sorted(range(len(amounts)), key=lambda index: (-amounts[index], index)):
        needed = amounts[index]
        fits = [at for at, (start, stop) in enumerate(left) if stop - start >= needed]
        for at in fits[:1] or range(len(left)):
            start, stop = left[at]
            taken = min(needed, stop - start)
            if taken:
                [piece], left[at] = _ends((start, stop), own, (taken,))
                cuts[index].append(piece)
                needed -= taken
    return cuts


def _from_one(past: Range, own: int, amounts: Sequence[int]) -> list[list[Range]]:
    pieces, _ = _ends(past, own, amounts)
    return [[piece] for piece in pieces]


def _ends(past: Range, own: int, amounts: Sequence[int]) -> tuple[list[Range], Range]:
    """Ranges one after another from the end that is far from `own`, and what is left."""
    start, stop = past
    pieces = []
    for amount in amounts:
        if start < own:
            pieces.append((start, start + amount))
            start += amount
        else:
            pieces.append((stop - amount, stop))
            stop -= amount
    return pieces, (start, stop)


def without(past: Sequence[Range], lent: Sequence[Range]) -> list[Range]:
    """What is left of `past` (ascending, disjoint) without `lent`, each of which lies inside one of its ranges."""
    left = []
    for start, stop in past:
        for a, b in sorted(lent):
            if start <= a and b <= stop:
                if start < a:
                    left.append((start, a))
                start = b
        if start < stop:
            left.append((start, stop))
    return left
