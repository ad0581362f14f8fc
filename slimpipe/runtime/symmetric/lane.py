"""The ends of a lane: one rank's tensors to another, or to several, in order, through a ring in the sender's memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from slimpipe.runtime.symmetric.ring import Piece, Ring


class Event(Protocol):
    """A place in a stream."""

    def done(self) -> bool:
        """Whether the stream is past it."""
        ...


class Stream(Protocol):
    """Work that a device does in order. Calls return at once."""

    def copy(self, target: Tensor, source: Tensor) -> None: ...

    def add(self, target: Tensor, source: Tensor) -> None:
        """`source` to `target`, in place."""
        ...

    def wait_until(self, counter: Tensor, value: int) -> None:
        """Nothing behind this begins before `counter` [1] int32 has come to `value`; both wrap at 32 bits."""
        ...

    def set(self, counter: Tensor, value: int) -> None:
        """Behind all that is before it in the stream, and seen by other devices only once they can see that."""
        ...

    def record(self) -> Event: ...

    def follow(self, event: Event) -> None:
        """Nothing behind this begins before `event` is done."""
        ...


class Device(Protocol):
    """Streams of the device on which a rank computes."""

    def current(self) -> Stream:
        """The one that the caller's work goes to."""
        ...

    def side(self) -> Stream:
        """A new one."""
        ...

    def synchronize(self) -> None:
        """The host waits until all streams are through."""
        ...


class Outgoing:
    """The sender's end. `ring` [capacity] uint8 and each receiver's `taken` are its own memory, `ready` is theirs."""

    def __init__(self, ring: Tensor, ready: Sequence[Tensor], taken: Sequence[Tensor], first: int = 0) -> None:
        self._bytes, self._ready, self._taken = ring, tuple(ready), tuple(taken)
        self._ring = Ring(ring.numel(), first)
        self._waits = Waits()

    def put(self, stream: Stream, tensor: Tensor) -> int:
        """Copies `tensor` into the ring, once there is room, and says so to all receivers. Once `stream` is past this,
        the tensor's memory is free. The number under which `follow` finds it."""
        number = 0
        for piece, part in pieces(self._ring, tensor):
            begin = stream.record()
            for taken in self._taken:
                stream.wait_until(taken, piece.after)
            self._waits.add(begin, stream.record())
            stream.copy(view(self._bytes, piece, part), part)
            for ready in self._ready:
                stream.set(ready, piece.number)
            number = piece.number
        return number

    def follow(self, stream: Stream, number: int) -> None:
        """Makes `stream` wait until all receivers have taken what was put under `number`."""
        for taken in self._taken:
            stream.wait_until(taken, number)

    def waits(self) -> bool:
        """Whether the device stands before a full ring."""
        return self._waits.any()


class Incoming:
    """A receiver's end. `ring` and `taken` are the sender's memory, `ready` is its own."""

    def __init__(self, ring: Tensor, ready: Tensor, taken: Tensor, first: int = 0) -> None:
        self._bytes, self._ready, self._taken = ring, ready, taken
        self._ring = Ring(ring.numel(), first)
        self._waits = Waits()

    def get(self, stream: Stream, out: Tensor) -> Event:
        """Fills `out`, contiguous, with the sender's next tensor, of the same size, once it is there.

        The event is done when it is filled."""
        assert out.is_contiguous()
        begin = end = stream.record()
        for piece, part in pieces(self._ring, out):
            stream.wait_until(self._ready, piece.number)
            stream.copy(part, view(self._bytes, piece, part))
            stream.set(self._taken, piece.number)
            end = stream.record()
        self._waits.add(begin, end)
        return end

    def waits(self) -> bool:
        """Whether the device is ready to take something that has not come."""
        return self._waits.any()


class Waits:
    """Stretches of a stream in which it may stand still. Asked by the watchdog, from a thread of its own."""

    def __init__(self) -> None:
        self._open: deque[tuple[Event, Event]] = deque()

    def add(self, begin: Event, end: Event) -> None:
        while self._open and self._open[0][1].done():
            self._open.popleft()
        self._open.append((begin, end))

    def any(self) -> bool:
        return any(begin.done() and not end.done() for begin, end in list(self._open))


def pieces(ring: Ring, tensor: Tensor) -> Iterator[tuple[Piece, Tensor]]:
    """The tensor, whole where it fits into the ring, else in parts that do."""
    if tensor.nbytes <= ring.capacity:
        if tensor.nbytes:
            yield ring.place(tensor.nbytes), tensor
        return
    # A view where the tensor is contiguous, as one that is received into is.
    for part in tensor.reshape(-1).split(ring.capacity // tensor.element_size()):
        yield ring.place(part.nbytes), part


def view(ring: Tensor, piece: Piece, like: Tensor) -> Tensor:
    """The piece's bytes in the shape and dtype of `like`."""
    return ring[piece.start : piece.start + piece.size].view(like.dtype).view(like.shape)
