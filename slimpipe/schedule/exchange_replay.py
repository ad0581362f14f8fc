"""The exchange's communicator under NCCL's rules, for `replay_in_order`.

A rank's batches run in the order of posting, one at a time. A batch is at work once it is the first of its rank's
queue; each of its sends then meets the receive that is next between the same two ranks in the batch at work over there,
and the batch ends with the last of them.
"""

from __future__ import annotations

from collections import deque

from slimpipe.schedule.action import Action
from slimpipe.schedule.exchange_transfers import Piece, postings
from slimpipe.schedule.loans import Exchange
from slimpipe.schedule.plan import PlanError


class _Batch:
    """A posting with what has yet to meet, by peer."""

    def __init__(self, name: str, sends: tuple[Piece, ...], receives: tuple[Piece, ...]) -> None:
        self.name = name
        self.sends: dict[int, deque[Piece]] = {}
        self.receives: dict[int, deque[Piece]] = {}
        for piece in sends:
            self.sends.setdefault(piece.dst, deque()).append(piece)
        for piece in receives:
            self.receives.setdefault(piece.src, deque()).append(piece)

    @property
    def peers(self) -> set[int]:
        """Ranks that this batch still waits for."""
        return {peer for ways in (self.sends, self.receives) for peer, left in ways.items() if left}


class ExchangeReplay:
    """All ranks' queues. `moved`: transfers that have met."""

    def __init__(self, exchange: Exchange, layers: int) -> None:
        self._exchange, self._layers = exchange, layers
        self._queues: list[deque[_Batch]] = [deque() for _ in range(exchange.slots.shape.p)]
        self._begun: list[Action | None] = [None] * exchange.slots.shape.p
        self.moved = 0

    def enter(self, rank: int, action: Action) -> set[int]:
        """The rank comes to an action with its input there and posts its batches, once. Returns ranks to look at."""
        if not (action.op.is_compute or action.op.is_help) or self._begun[rank] == action:
            return set()
        self._begun[rank] = action
        for posting in postings(self._exchange, rank, action, self._layers):
            name = f"batch {posting.batch} of layer {posting.layer} of {action}"
            self._queues[rank].append(_Batch(name, posting.sends, posting.receives))
        return self._meet(rank)

    def waits_for(self, rank: int) -> str | None:
        """Why the rank is not done with the action that it entered."""
        queue = self._queues[rank]
        return f"{queue[0].name} waits for ranks {sorted(queue[0].peers)}" if queue else None

    def _meet(self, rank: int) -> set[int]:
        """Carry queues on as far as transfers at `rank` allow. Returns the ranks whose queues have become empty."""
        emptied: set[int] = set()
        look_at = [rank]
        while look_at:
            here = look_at.pop()
            if not self._queues[here]:
                continue
            batch = self._queues[here][0]
            for peer in batch.peers:
                if self._queues[peer]:
                    self._match(batch, here, self._queues[peer][0], peer)
                    if self._drop_ended(peer):
                        look_at.append(peer)
                        if not self._queues[peer]:
                            emptied.add(peer)
            if self._drop_ended(here):
                look_at.append(here)
                if not self._queues[here]:
                    emptied.add(here)
        return emptied

    def _match(self, one: _Batch, rank: int, other: _Batch, peer: int) -> None:
        for sends, receives in (
            (one.sends.get(peer), other.receives.get(rank)),
            (other.sends.get(rank), one.receives.get(peer)),
        ):
            while sends and receives:
                sent, received = sends.popleft(), receives.popleft()
                if sent != received:
                    raise PlanError(f"exchange: the {sent} arrives where the {received} is expected")
                self.moved += 1

    def _drop_ended(self, rank: int) -> bool:
        if not self._queues[rank] or self._queues[rank][0].peers:
            return False
        self._queues[rank].popleft()
        return True
