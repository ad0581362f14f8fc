"""Who computes how much of whose past in one slot: the three modes of exchange (SlimPipe 4.2; docs/exchange.md).

Works on one slot's pasts by rank, None for a rank that is idle there, and knows nothing of buffers. Slots with equal
pasts get equal moves, so a plan has few of them to make.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from slimpipe.schedule.matching import match
from slimpipe.schedule.slots import Kind, Pasts
from slimpipe.schedule.work import Work

Fill = Literal["time", "attention"]
"""What idle ranks take: as long as busy ranks need for all of their work, or for attention alone."""

Passes = Callable[[Kind, int, int, int], bool]
"""(kind, owner, helper, tokens) -> whether a loan of so many tokens is worth its transfers."""

_ROUNDING = 1e-9
"""Costs are floats: 2 granules of dense time must not come out as 1.9999 and be cut to 1."""


class Move(NamedTuple):
    """`helper` computes `amount` of `owner`'s past."""

    owner: int
    helper: int
    amount: int


def pairwise_moves(pasts: Pasts) -> list[Move]:
    """The paper's exchange, in slices: the j-th smallest past takes half the difference from the j-th largest.

    Only where all ranks work: the paper has no helpers without a slice of their own.
    """
    busy = [past for past in pasts if past is not None]
    if len(busy) < len(pasts):
        return []
    ascending = sorted(range(len(busy)), key=lambda rank: busy[rank])
    pairs = zip(ascending[: len(busy) // 2], reversed(ascending), strict=False)
    moves = [Move(large, small, (busy[large] - busy[small]) // 2) for small, large in pairs]
    return [move for move in moves if move.amount > 0]


def balanced_moves(pasts: Pasts, idle_more: float, ranks_per_node: int, spare: int = 0) -> list[Move]:
    """The least longest rank that whole granules can reach; at most p - 1 moves.

    `idle_more`: how many granules more an idle rank has time for than a busy one: what a busy one cannot give away.
    `spare`: granules that a helper takes less than an owner keeps, as transfers take their time.
    """
    busy, idle = levels(pasts, idle_more)

    def fits(more: int) -> bool:
        """Whether busy ranks can keep to `more` granules above their level. If so, then to one more too."""
        level, free = busy + more, idle + more - spare
        surplus = sum([past - level for past in pasts if past is not None and past > level])
        return surplus <= sum([max(0, free if past is None else level - spare - past) for past in pasts])

    # Without a spare the levels fit, so as much more as the spare does in any case.
    more = bisect_left(range(spare), True, key=fits)
    busy, idle = busy + more, idle + more
    surplus = {rank: past - busy for rank, past in enumerate(pasts) if past is not None and past > busy}
    room = {rank: (idle if past is None else busy - past) - spare for rank, past in enumerate(pasts)}
    room = {rank: granules for rank, granules in room.items() if granules > 0}
    return [Move(*matched) for matched in match(surplus, room, ranks_per_node)]


def idle_more(work: Work, kind: Kind, fill: Fill, granule: int) -> float:
    """How many granules of `granule` tokens more an idle rank takes than a busy one."""
    load = work.of(kind)
    return (load.own if fill == "attention" else load.stays) / (load.token * granule)


def levels(pasts: Sequence[int | None], idle_more: float) -> tuple[int, int]:
    """Granules that a busy and an idle rank compute at most, where the longest rank is as short as can be.

    As the time allowed to the longest rank grows, busy and idle ranks gain a granule in turn: (0, w), (0, w + 1),
    (1, w + 1), ... with w the whole part of `idle_more`; both at once where it has no other part.
    """
    total = sum(past for past in pasts if past is not None)
    idle = sum(past is None for past in pasts)
    whole = math.floor(idle_more + _ROUNDING)
    level = _divide_up(total - idle * whole, len(pasts))
    if idle_more - whole > _ROUNDING:
        idle_first = _divide_up(total - idle * (whole + 1), len(pasts))
        if idle_first < level:
            return idle_first, idle_first + whole + 1
    return level, level + whole


def _divide_up(amount: int, by: int) -> int:
    return max(0, -(-amount // by))
