"""A transport between threads of one process that keeps NCCL's rule, for tests without GPUs
(docs/architecture.md, "NCCL order").

gloo matches messages by tag and never shows an order that would hang NCCL. Here the operations of one communicator
run, on each rank, in the order in which they were posted: a transfer takes place only when both of its ends are at
the head of their queues. When every rank waits, all of them are told what each waits for.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from slimpipe.runtime.collectives import Pending
from slimpipe.runtime.transport import Receive
from slimpipe.schedule import Link
from slimpipe.schedule.collectives import Communicator


class InOrderDeadlock(RuntimeError):
    """Every rank waits for a transfer that can not take place."""


@dataclass(eq=False)
class _Collective:
    """One rank's part of an operation that all ranks take part in."""

    kind: str
    communicator: Communicator
    rank: int
    tensor: Tensor
    root: int = 0
    result: Tensor | None = None

    @property
    def done(self) -> bool:
        return self.result is not None

    def __str__(self) -> str:
        return f"rank {self.rank} waits for a {self.kind} on communicator {self.communicator}"


@dataclass(eq=False)
class _Batch:
    """One rank's group of transfers on the exchange's communicator: done when all its transfers are."""

    rank: int
    sends: list[tuple[Tensor, int]]
    receives: list[tuple[Tensor, int]]

    @property
    def done(self) -> bool:
        return not self.sends and not self.receives

    def __str__(self) -> str:
        peers = sorted({peer for _, peer in (*self.sends, *self.receives)})
        return f"rank {self.rank} waits for a batch of the exchange with ranks {peers}"


@dataclass(eq=False)
class _Posted:
    link: Link
    rank: int
    tensor: Tensor | None
    done: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} waits to {'send' if self.rank == self.link.src else 'receive'} on link {self.link}"


class InOrderWorld:
    """The ranks' common state. `communicator` says which communicator a link uses; by default each has its own."""

    def __init__(
        self, ranks: int, communicator: Callable[[Link], Hashable] = lambda link: link, send_window: int = 2
    ) -> None:
        self.ranks, self._communicator, self.send_window = ranks, communicator, send_window
        self._changed = threading.Condition()
        self._queues: dict[tuple[int, Hashable], deque[_Posted]] = {}
        self._collectives: dict[tuple[int, Communicator], deque[_Collective]] = {}
        self._batches: list[deque[_Batch]] = [deque() for _ in range(ranks)]
        self._waiting: dict[int, _Posted | _Collective | _Batch] = {}
        self._finished: set[int] = set()
        self._stuck: str | None = None

    def transport(self, rank: int) -> InOrderTransport:
        return InOrderTransport(self, rank)

    def collectives(self, rank: int) -> InOrderCollectives:
        return InOrderCollectives(self, rank)

    def exchange(self, rank: int) -> InOrderExchange:
        return InOrderExchange(self, rank)

    def leave(self, rank: int) -> None:
        """The rank's thread is over, well or badly: nobody need expect more of it."""
        with self._changed:
            self._finished.add(rank)
            self._look_for_deadlock()

    def post(self, operation: _Posted) -> None:
        with self._changed:
            self._queue(operation.rank, operation.link).append(operation)
            self._advance(operation.link)

    def post_collective(self, operation: _Collective) -> None:
        with self._changed:
            self._collectives.setdefault((operation.rank, operation.communicator), deque()).append(operation)
            queues = [self._collectives.get((rank, operation.communicator)) for rank in range(self.ranks)]
            while all(queues):
                _carry_out([queue.popleft() for queue in queues if queue])
            self._changed.notify_all()

    @torch.no_grad()
    def post_batch(self, batch: _Batch) -> None:
        with self._changed:
            self._batches[batch.rank].append(batch)
            while any([self._advance_batch(queue) for queue in self._batches]):
                pass
            self._changed.notify_all()

    def _advance_batch(self, queue: deque[_Batch]) -> bool:
        """Carries out what it can of the batch at the head of a rank's queue; true if anything moved."""
        if not queue:
            return False
        batch, moved = queue[0], False
        for tensor, peer in list(batch.sends):
            other = self._batches[peer][0] if self._batches[peer] else None
            index = -1 if other is None else _first(other.receives, batch.rank)
            if other is not None and index >= 0 and _first(batch.sends, peer) == _position(batch.sends, tensor):
                other.receives.pop(index)[0].copy_(tensor)
                del batch.sends[_position(batch.sends, tensor)]
                moved = True
        if batch.done:
            queue.popleft()
            moved = True
        return moved

    def wait(self, operation: _Posted | _Collective | _Batch) -> None:
        with self._changed:
            self._waiting[operation.rank] = operation
            self._look_for_deadlock()
            self._changed.wait_for(lambda: operation.done or self._stuck)
            del self._waiting[operation.rank]
            if not operation.done:
                raise InOrderDeadlock(self._stuck)

    def _queue(self, rank: int, link: Link) -> deque[_Posted]:
        return self._queues.setdefault((rank, self._communicator(link)), deque())

    def _advance(self, link: Link) -> None:
        """Carries out every transfer whose two ends have come to the head of their queues."""
        moved = True
        while moved:
            moved = False
            for queue in list(self._queues.values()):
                if queue and self._pair(queue[0].link):
                    moved = True
        self._changed.notify_all()

    def _pair(self, link: Link) -> bool:
        sender, receiver = self._queue(link.src, link), self._queue(link.dst, link)
        if not sender or not receiver or sender[0].link != link or receiver[0].link != link:
            return False
        source, target = sender.popleft(), receiver.popleft()
        assert source.tensor is not None
        target.tensor = source.tensor.clone()
        source.done = target.done = True
        return True

    def _look_for_deadlock(self) -> None:
        blocked = {rank for rank, operation in self._waiting.items() if not operation.done}
        if self._stuck is None and blocked and len(blocked | self._finished) == self.ranks:
            self._stuck = "; ".join(str(self._waiting[rank]) for rank in sorted(blocked))
            self._changed.notify_all()


def _first(transfers: list[tuple[Tensor, int]], peer: int) -> int:
    """Index of the first transfer with `peer`, -1 if there is none: those of a pair match in their order."""
    return next((index for index, (_, other) in enumerate(transfers) if other == peer), -1)


def _position(transfers: list[tuple[Tensor, int]], tensor: Tensor) -> int:
    return next(index for index, (other, _) in enumerate(transfers) if other is tensor)


def _carry_out(parts: list[_Collective]) -> None:
    """The heads of all ranks' queues, by rank: they must be one and the same operation."""
    if len({(part.kind, part.root, part.tensor.shape) for part in parts}) != 1:
        raise InOrderDeadlock("; ".join(f"{part}, root {part.root}, {list(part.tensor.shape)}" for part in parts))
    kind, root = parts[0].kind, parts[0].root
    tensors = [part.tensor for part in parts]
    for part in parts:
        if kind == "reduce":
            others = (tensor for rank, tensor in enumerate(tensors) if rank != root)
            # The root's own, then the others by rank: an order that can be kept elsewhere.
            part.result = reduce(torch.add, others, tensors[root]) if part.rank == root else part.tensor
        elif kind == "broadcast":
            part.result = tensors[root].clone()
        else:
            part.result = torch.stack(tensors)


class _PendingCollective:
    def __init__(self, world: InOrderWorld, operation: _Collective) -> None:
        self._world, self._operation = world, operation

    def wait(self) -> Tensor:
        self._world.wait(self._operation)
        assert self._operation.result is not None
        return self._operation.result


class InOrderCollectives:
    """One rank's end of the collectives of an `InOrderWorld`: a communicator's run in posting order on every rank."""

    def __init__(self, world: InOrderWorld, rank: int) -> None:
        self._world, self._rank = world, rank

    def reduce(self, communicator: Communicator, tensor: Tensor, root: int) -> Pending:
        return self._post("reduce", communicator, tensor, root)

    def broadcast(self, communicator: Communicator, tensor: Tensor, root: int) -> Pending:
        return self._post("broadcast", communicator, tensor, root)

    def gather(self, communicator: Communicator, tensor: Tensor) -> Pending:
        return self._post("gather", communicator, tensor, 0)

    def _post(self, kind: str, communicator: Communicator, tensor: Tensor, root: int) -> Pending:
        operation = _Collective(kind, communicator, self._rank, tensor.contiguous(), root)
        self._world.post_collective(operation)
        return _PendingCollective(self._world, operation)


class _PendingBatch:
    def __init__(self, world: InOrderWorld, batch: _Batch) -> None:
        self._world, self._batch = world, batch

    def wait(self) -> None:
        self._world.wait(self._batch)

    def follow(self) -> bool:
        return False


class InOrderExchange:
    """One rank's end of the exchange of an `InOrderWorld`: a rank's batches run one after the other."""

    def __init__(self, world: InOrderWorld, rank: int) -> None:
        self._world, self._rank = world, rank

    def post(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> _PendingBatch:
        batch = _Batch(self._rank, list(sends), list(receives))
        self._world.post_batch(batch)
        return _PendingBatch(self._world, batch)


class _PostedReceive:
    def __init__(self, world: InOrderWorld, operation: _Posted) -> None:
        self._world, self._operation = world, operation

    def wait(self) -> Tensor:
        self._world.wait(self._operation)
        assert self._operation.tensor is not None
        return self._operation.tensor


class InOrderTransport:
    """One rank's end of an `InOrderWorld`."""

    def __init__(self, world: InOrderWorld, rank: int) -> None:
        self._world, self._rank, self._send_window = world, rank, world.send_window
        self._sends: dict[Link, deque[_Posted]] = {}

    def post_receive(self, link: Link) -> Receive:
        operation = _Posted(link, self._rank, None)
        self._world.post(operation)
        return _PostedReceive(self._world, operation)

    def send(self, link: Link, tensor: Tensor) -> None:
        under_way = self._sends.setdefault(link, deque())
        while len(under_way) >= self._send_window:
            self._world.wait(under_way.popleft())
        operation = _Posted(link, self._rank, tensor)
        self._world.post(operation)
        under_way.append(operation)

    def allow(self, sends: int) -> None:
        self._send_window = max(self._send_window, sends)

    def finish(self) -> None:
        for under_way in self._sends.values():
            while under_way:
                self._world.wait(under_way.popleft())
