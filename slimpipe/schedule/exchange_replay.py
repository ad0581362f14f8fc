"""The exchange's communicator under NCCL's rules, for `replay_in_order`.

A rank's batches run in the order of posting, one at a time. A batch is at work once it is the first of its rank's
queue; each of its sends then meets the receive that is next between the same two ranks in the batch at work over there,
and the batch ends with the last of them.
"""

from __future__ import annotations

from collections import deque

from slimpipe.schedule.action import Action
from slimpipe.schedule.exchange_transfers import Piece, Posting, postings
from slimpipe.schedule.loans import Exchange
from slimpipe.schedule.plan import PlanError


class _Batch:
    """A posting with what has yet to meet, by peer. Peers with nothing left are out of it."""

    def __init__(self, action: Action, posting: Posting) -> None:
        self._action, self._posting = action, posting
        self.sends: dict[int, list[Piece]] = {}
        self.receives: dict[int, list[Piece]] = {}
        for piece in posting.sends:
            self.sends.setdefault(piece.dst, []).append(piece)
        for piece in posting.receives:
            self.receives.setdefault(piece.src, []).append(piece)

    def __str__(self) -> str:
        return f"batch {self._posting.batch} of layer {self._posting.layer} of {self._action}"

    @property
    def ended(self) -> bool:
        return not self.sends and not self.receives

    @property
    def peers(self) -> set[int]:
        """Ranks that this batch still waits for."""
        return {*self.sends, *self.receives}


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
            self._queues[rank].append(_Batch(action, posting))
        return self._meet(rank)

    def waits(self, rank: int) -> bool:
        """Whether the rank is not done with the action that it entered."""
        return bool(self._queues[rank])

    def waits_for(self, rank: int) -> str | None:
        """Why it is not; None where it is."""
        queue = self._queues[rank]
        return f"{queue[0]} waits for ranks {sorted(queue[0].peers)}" if queue else None

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
        self._carry(one.sends, peer, other.receives, rank)
        self._carry(other.sends, rank, one.receives, peer)

    def _carry(self, sends: dict[int, list[Piece]], dst: int, receives: dict[int, list[Piece]], src: int) -> None:
        """One direction between two batches: each send meets the next receive, as far as there are both."""
        sent, received = sends.get(dst), receives.get(src)
        if not sent or not received:
            return
        met = min(len(sent), len(received))
        if sent[:met] != received[:met]:
            send, receive = next(pair for pair in zip(sent, received, strict=False) if pair[0] != pair[1])
            raise PlanError(f"exchange: the {send} arrives where the {receive} is expected")
        self.moved += met
        for ways, peer in ((sends, dst), (receives, src)):
            del ways[peer][:met]
            if not ways[peer]:
                del ways[peer]

    def _drop_ended(self, rank: int) -> bool:
        if not self._queues[rank] or not self._queues[rank][0].ended:
            return False
        self._queues[rank].popleft()
        return True
