"""Pairs those who have too much with those who have room, in few pairs and near ones first (docs/exchange.md)."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator


def match(surplus: dict[int, int], room: dict[int, int], ranks_per_node: int) -> Iterator[tuple[int, int, int]]:
    """(owner, helper, amount) until no surplus is left; the room must suffice. Fewer pairs than ranks in both.

    Ranks of one node first, since their links are faster. Among those, an owner and a helper of equal amounts, which
    settles both at once, then the largest with the largest, which settles one of them.
    """
    surplus, room = dict(surplus), dict(room)
    nodes = {rank // ranks_per_node for rank in surplus} & {rank // ranks_per_node for rank in room}
    for node in sorted(nodes):
        ranks = range(node * ranks_per_node, (node + 1) * ranks_per_node)
        owners = {rank: surplus.pop(rank) for rank in ranks if rank in surplus}
        helpers = {rank: room.pop(rank) for rank in ranks if rank in room}
        yield from _match(owners, helpers)
        surplus |= owners
        room |= helpers
    yield from _match(surplus, room)


def _match(surplus: dict[int, int], room: dict[int, int]) -> Iterator[tuple[int, int, int]]:
    """Pairs as many as it can, and takes what it pairs out of `surplus` and `room`."""
    by_room: defaultdict[int, list[int]] = defaultdict(list)
    for helper in sorted(room, reverse=True):
        by_room[room[helper]].append(helper)
    for owner, amount in sorted(surplus.items()):
        if by_room[amount]:
            helper = by_room[amount].pop()
            del surplus[owner], room[helper]
            yield owner, helper, amount
    owners = [(-amount, owner) for owner, amount in surplus.items()]
    helpers = [(-amount, helper) for helper, amount in room.items()]
    heapq.heapify(owners)
    heapq.heapify(helpers)
    while owners and helpers:
        (has, owner), (takes, helper) = owners[0], helpers[0]
        amount = min(-has, -takes)
        for heap, left, rank, amounts in ((owners, has, owner, surplus), (helpers, takes, helper, room)):
            if left + amount:
                heapq.heapreplace(heap, (left + amount, rank))
                amounts[rank] -= amount
            else:
                heapq.heappop(heap)
                del amounts[rank]
        yield owner, helper, amount
