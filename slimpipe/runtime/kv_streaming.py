"""Key-value slots in pinned host memory, a layer at a time on the device (`memory.kv_swap`; docs/pipeline_swap.md).

A layer's slots are needed while its attention runs, forward or backward: a *visit*. The order of a step's visits is
known, so each visit, as it begins, starts the copies of the next one:

    compute   | layer 4             | layer 5             |
    in                | slots of 5          | slots of 6          |
    out                             | written by 4        | written by 5

Compute waits for a visit's copies by event, and copies in wait for the copies out that wrote what they read. Nothing
waits on the host. Slots have the same places in the room on the device as they have where they stay there: kernels see
the same tensors, and results are the same bits. A visit that was not expected is served all the same, only later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch
from torch import Tensor

from slimpipe.kernels.fuse import wide
from slimpipe.runtime.kv_slots import LayerSlots, SlicePlace
from slimpipe.schedule.kv_slots import Ranges
from slimpipe.schedule.kv_stream import BUFFERS, slot_moves
from slimpipe.swap.arena import PinnedArenas
from slimpipe.swap.geometry import ALIGNMENT
from slimpipe.swap.streams import Event, Streams

ARENA_BYTES: Final = 1 << 30
PIECE_BYTES: Final = 1 << 26
"""Host memory is taken in pieces of no more: slots of any size then fill arenas. Copying one takes over a millisecond,
starting that some microseconds."""


class KVHostMemoryError(ValueError):
    """There is not as much pinned memory as keys, values and their gradients need."""


class Piece(NamedTuple):
    """Part of one slot on the host, uint8. `which`: 0 of K (or dK), 1 of V (or dV); `begin`: its place in that room."""

    which: int
    begin: int
    memory: Tensor


Pieces = Sequence[Sequence[Piece]]
"""By slot."""


class Visit(NamedTuple):
    """One layer's attention of one unit, forward or backward. `layer` counts over the whole model."""

    layer: int
    place: SlicePlace
    backward: bool


@dataclass(eq=False)
class _Room:
    """One layer's K and V, or dK and dV, on the device: two flat uint8 tensors. `after`: copies under way that a next
    user waits for."""

    pair: tuple[Tensor, Tensor]
    after: list[Event] = field(default_factory=list)


@dataclass(eq=False)
class _Kind:
    """K and V, or dK and dV. `rooms` are used in turn."""

    rooms: list[_Room] = field(default_factory=list)
    turn: int = 0

    @property
    def nbytes(self) -> int:
        """Of one tensor."""
        return self.rooms[0].pair[0].numel() if self.rooms else 0

    def next(self) -> _Room:
        self.turn = (self.turn + 1) % len(self.rooms)
        return self.rooms[self.turn]


@dataclass(eq=False)
class _Fetched:
    """A visit's rooms, and what compute waits for before it uses them. `late`: ranges of K and V, of dK and dV, which
    the visit before it has yet to write."""

    visit: Visit
    keys: _Room
    gradients: _Room | None
    events: list[Event]
    late: tuple[Ranges, Ranges]


class StreamedSlots(LayerSlots):
    """`LayerSlots` that are on the device from `enter` to `leave`."""

    def __init__(self, slots: int, slice_tokens: int, accumulate: bool, layer: int, streams: SlotStreams) -> None:
        super().__init__(slots, slice_tokens, accumulate)
        self.layer, self._streams = layer, streams
        self.host_keys: Pieces = ()
        self.host_gradients: Pieces = ()
        self.keys_written: list[Event] = []
        """The last copy out."""
        self.gradients_written: list[Event] = []
        self.like: Tensor | None = None
        """Of no tokens: k as this layer has it."""

    def enter(self, place: SlicePlace, backward: bool) -> None:
        self._streams.enter(self, Visit(self.layer, place, backward))

    def leave(self) -> None:
        self._streams.leave(self)

    def _allocate(self, k: Tensor, v: Tensor) -> None:
        self._streams.allocate(self, k, v)

    def use(self, keys: _Room, gradients: _Room | None) -> None:
        """Makes the tensors of a layer out of rooms."""
        like = self.like
        assert like is not None
        self.forget_parts()
        shape = (like.shape[0], self.slots * self.slice_tokens, *like.shape[2:])
        self.k, self.v = (_view(flat, shape, like.dtype) for flat in keys.pair)
        if gradients is not None and self.accumulates:
            self.dk, self.dv = (_view(flat, shape, wide(like.dtype)) for flat in gradients.pair)

    def forget(self) -> None:
        """Lets go of the rooms."""
        self.forget_parts()
        self.k = self.v = self.dk = self.dv = None


class SlotStreams:
    """One rank's. `capacity`: slots of its largest chunk. `host_budget`: bytes that may be pinned; None: any number.
    `waiting` goes around each wait of the compute stream for copies."""

    def __init__(
        self,
        streams: Streams,
        capacity: int,
        host_budget: int | None,
        waiting: Callable[[], AbstractContextManager[None]],
        arena_bytes: int = ARENA_BYTES,
    ) -> None:
        budget = 1 << 62 if host_budget is None else host_budget
        self.streams, self.arenas = streams, PinnedArenas(streams.host_memory, streams.done, budget, arena_bytes)
        self._capacity, self._waiting, self._host_budget = capacity, waiting, host_budget
        self._slots: dict[int, StreamedSlots] = {}
        self._keys, self._gradients = _Kind(), _Kind()
        self._expected: Sequence[Visit] = ()
        self._at = 0
        self._open: Visit | None = None
        self._current: _Fetched | None = None
        self._ahead: _Fetched | None = None
        self.moved_out = self.moved_in = 0
        """Bytes since `begin`."""

    def make(self, slots: int, slice_tokens: int, accumulate: bool, layer: int) -> StreamedSlots:
        """The slots of a layer of this rank."""
        found = self._slots[layer] = StreamedSlots(slots, slice_tokens, accumulate, layer, self)
        return found

    @property
    def device_bytes(self) -> int:
        """Of the room on the device."""
        rooms = [*self._keys.rooms, *self._gradients.rooms]
        return sum(flat.nbytes for room in rooms for flat in room.pair)

    def begin(self, visits: Sequence[Visit]) -> None:
        """Before a step, or an evaluation's batch: the visits to come, in their order."""
        self._settle()
        self._expected, self._at = visits, 0
        self.moved_out = self.moved_in = 0

    def end(self) -> None:
        """Behind it: what comes is not expected."""
        self._settle()
        self._expected, self._at = (), 0

    def _settle(self) -> None:
        """After a step that failed copies may be under way that nobody has waited for."""
        for room in (*self._keys.rooms, *self._gradients.rooms):
            self._wait(room.after)
            room.after = []
        self._open = self._current = self._ahead = None

    # A visit

    def enter(self, slots: StreamedSlots, visit: Visit) -> None:
        """The layer's slots are on the device, for the compute that follows. Nothing if the visit has begun."""
        if self._open == visit:
            return
        self._open = visit
        current = self._ahead
        if current is None or current.visit != visit:
            current = self._fetch(visit, None)
        else:
            self._fetch_late(slots, current)
        self._ahead, self._current = None, current
        following = self._following(visit)
        if following is not None:
            self._ahead = self._fetch(following, visit)
        if current.events:
            with self._waiting():
                self._wait(current.events)
        slots.use(current.keys, current.gradients)

    def _following(self, visit: Visit) -> Visit | None:
        """What is expected behind a visit; nothing where that was not."""
        while self._at < len(self._expected) and self._expected[self._at] != visit:
            self._at += 1
        self._at += 1
        # Layers without attention have no slots.
        while self._at < len(self._expected) and self._slots[self._expected[self._at].layer].like is None:
            self._at += 1
        return self._expected[self._at] if self._at < len(self._expected) else None

    def leave(self, slots: StreamedSlots) -> None:
        """Behind the layer's compute: what it wrote goes to the host."""
        current = self._current
        assert current is not None and current.visit.layer == slots.layer
        place = current.visit.place
        moves = slot_moves(place.slot, place.past, current.visit.backward, place.last)
        if moves.keys_out:
            slots.keys_written = self._copy_out(current.keys, slots.host_keys, moves.keys_out)
        if moves.gradients_out and current.gradients is not None:
            slots.gradients_written = self._copy_out(current.gradients, slots.host_gradients, moves.gradients_out)
        self._open = self._current = None

    def _fetch(self, visit: Visit, running: Visit | None) -> _Fetched:
        """Starts the copies of a visit; those of slots that `running`, under way, has yet to write are left for
        later."""
        slots, place = self._slots[visit.layer], visit.place
        moves = slot_moves(place.slot, place.past, visit.backward, place.last)
        late: tuple[Ranges, Ranges] = ((), ())
        if running is not None and running.layer == visit.layer:
            before = slot_moves(running.place.slot, running.place.past, running.backward, running.place.last)
            late = _both(moves.keys_in, before.keys_out), _both(moves.gradients_in, before.gradients_out)
        keys = self._keys.next()
        events = self._copy_in(keys, slots.host_keys, _less(moves.keys_in, late[0]), slots.keys_written)
        gradients = None
        if visit.backward and slots.accumulates:
            gradients = self._gradients.next()
            now = _less(moves.gradients_in, late[1])
            events += self._copy_in(gradients, slots.host_gradients, now, slots.gradients_written)
        return _Fetched(visit, keys, gradients, events, late)

    def _fetch_late(self, slots: StreamedSlots, found: _Fetched) -> None:
        keys, gradients = found.late
        if keys:
            found.events += self._copy_in(found.keys, slots.host_keys, keys, slots.keys_written)
        if gradients and found.gradients is not None:
            found.events += self._copy_in(found.gradients, slots.host_gradients, gradients, slots.gradients_written)

    # Copies

    def _copy_in(self, room: _Room, host: Pieces, ranges: Ranges, written: list[Event]) -> list[Event]:
        """What compute waits for before it uses the room: also where nothing is copied."""
        pairs = [(part, place) for place, part in _pairs(room, host, ranges)]
        if pairs:
            # What was in the room may be on its way out; what is copied here may be on its way to the host.
            room.after = [self.streams.copies(pairs, True, [*room.after, *written])]
            self.moved_in += sum(part.nbytes for part, _ in pairs)
        return list(room.after)

    def _copy_out(self, room: _Room, host: Pieces, ranges: Ranges) -> list[Event]:
        pairs = list(_pairs(room, host, ranges))
        room.after = [self.streams.copies(pairs, False, [])]
        self.moved_out += sum(part.nbytes for _, part in pairs)
        return list(room.after)

    def _wait(self, events: Iterable[Event]) -> None:
        for event in events:
            self.streams.wait(event)

    # Memory

    def allocate(self, slots: StreamedSlots, k: Tensor, v: Tensor) -> None:
        """Host memory of one layer, and room on the device that is large enough for it; layers may differ. Raises
        KVHostMemoryError, and ValueError where values are not like their keys, whose places they have."""
        if (v.shape, v.dtype) != (k.shape, k.dtype):
            of_k, of_v = (f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in (k, v))
            raise ValueError(
                f"memory.kv_swap: layer {slots.layer} attends with k {of_k}, v {of_v}; give slice.attend both in one "
                "shape and dtype, or set it to off"
            )
        slots.like = k.new_empty((k.shape[0], 0, *k.shape[2:]))
        numbers = k.shape[0] * slots.slice_tokens * k[0, 0].numel()
        keys, gradients = numbers * k.element_size(), numbers * wide(k.dtype).itemsize
        self._limit(slots.slots * (keys + (gradients if slots.accumulates else 0)) * 2)
        slots.host_keys = self._pinned(slots.slots, keys, k.shape[0])
        if slots.accumulates:
            slots.host_gradients = self._pinned(slots.slots, gradients, k.shape[0])
        self._make_room(self._capacity * keys, self._capacity * gradients if slots.accumulates else 0)
        for other in self._slots.values():
            if other.like is not None:
                other.use(self._keys.rooms[0], self._gradients.rooms[0])

    def _make_room(self, keys: int, gradients: int) -> None:
        """For two tensors of so many bytes each, of either kind."""
        if keys <= self._keys.nbytes and gradients <= self._gradients.nbytes:
            return
        self._settle()
        for slots in self._slots.values():
            slots.forget()
        for kind, nbytes in ((self._keys, keys), (self._gradients, gradients)):
            nbytes = max(nbytes, kind.nbytes)
            kind.rooms.clear()  # before there is other memory in its place
            kind.rooms += [_Room((self.streams.empty(nbytes), self.streams.empty(nbytes))) for _ in range(BUFFERS)]

    def _limit(self, nbytes: int) -> None:
        """Of a budget no more is pinned than these bytes need: what is left of it is others'."""
        if self._host_budget is not None:
            free = self.arenas.pinned - self.arenas.in_use
            self.arenas.budget = min(self._host_budget, self.arenas.pinned + max(0, nbytes - free))

    def _pinned(self, count: int, nbytes: int, rows: int) -> Pieces:
        """So many slots of two tensors, each of `nbytes` bytes in so many rows."""
        row = nbytes // rows

        def pieces(slot: int) -> Iterator[Piece]:
            for which in range(2):
                for number in range(rows):
                    begin = (number * count + slot) * row
                    for size in (min(PIECE_BYTES, row - done) for done in range(0, row, PIECE_BYTES)):
                        for memory in self._taken(size):
                            yield Piece(which, begin, memory)
                            begin += memory.numel()

        return [list(pieces(slot)) for slot in range(count)]

    def _taken(self, nbytes: int) -> Iterator[Tensor]:
        """In one, or where that finds no place in what is left of the budget, in smaller ones."""
        found = self.arenas.take(nbytes)
        if found is not None:
            yield found.memory
            return
        half = nbytes // 2 // ALIGNMENT * ALIGNMENT
        if not half or self.arenas.refusal is not None:
            reason = self.arenas.refusal or f"at most {self.arenas.budget:,} bytes may be pinned"
            raise KVHostMemoryError(f"{nbytes:,} bytes found no place in pinned host memory: {reason}")
        yield from self._taken(half)
        yield from self._taken(nbytes - half)


def _pairs(room: _Room, host: Pieces, ranges: Ranges) -> Iterator[tuple[Tensor, Tensor]]:
    """(bytes on the device, bytes on the host) of these slots, contiguous on both sides."""
    for start, stop in ranges:
        for piece in (piece for slot in host[start:stop] for piece in slot):
            yield room.pair[piece.which][piece.begin : piece.begin + piece.memory.numel()], piece.memory


def _view(flat: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    size = torch.Size(shape).numel()
    return flat[: size * dtype.itemsize].view(dtype).view(shape)


def _both(some: Ranges, others: Ranges) -> Ranges:
    """Where they meet."""
    found = ((max(a, c), min(b, d)) for a, b in some for c, d in others)
    return tuple((start, stop) for start, stop in found if start < stop)


def _less(some: Ranges, others: Ranges) -> Ranges:
    """`some` without `others`, which lie in them."""
    for c, d in others:
        some = tuple(part for a, b in some for part in ((a, min(b, c)), (max(a, d), b)) if part[0] < part[1])
    return some
