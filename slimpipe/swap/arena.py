"""Pinned host memory: a few large arenas, cut into slots.

The caching host allocator of PyTorch rounds each block up to a power of two and never splits one, and pinning costs
about 0.4 s a GiB. So arenas are powers of two, stay for good, and are best pinned before training (`reserve`).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from slimpipe.swap.geometry import ALIGNMENT
from slimpipe.swap.streams import Event


@dataclass(eq=False)
class Slot:
    """`memory`: uint8 of the asked length. Who writes it waits for the events `after` first: reads by earlier users."""

    memory: Tensor
    arena: int
    begin: int
    end: int
    after: list[Event]


@dataclass(order=True)
class _Free:
    begin: int
    end: int
    after: list[Event] = field(compare=False)


class PinnedArenas:
    """At most `budget` bytes in arenas of `arena_bytes` each (larger ones for larger slots).

    `allocate` makes pinned memory or raises RuntimeError; then no more is asked for, and `refusal` says what happened.
    `done` tells whether an event is over.
    """

    def __init__(
        self, allocate: Callable[[int], Tensor], done: Callable[[Event], bool], budget: int, arena_bytes: int
    ) -> None:
        self.budget, self.pinned, self.in_use, self.peak = budget, 0, 0, 0
        self.refusal: str | None = None
        self._allocate, self._done = allocate, done
        self._arena_bytes = _power_of_two_below(max(ALIGNMENT, arena_bytes))
        self._arenas: list[Tensor] = []
        self._free: list[list[_Free]] = []

    def take(self, nbytes: int) -> Slot | None:
        """The smallest free block that holds `nbytes`; None where there is none and no arena may be added."""
        length = -(-nbytes // ALIGNMENT) * ALIGNMENT
        found = self._smallest(length)
        if found is None and self._grow(length):
            found = self._smallest(length)
        if found is None:
            return None
        arena, block = found
        begin, block.begin = block.begin, block.begin + length
        if block.begin == block.end:
            self._free[arena].remove(block)
        self.in_use += length
        self.peak = max(self.peak, self.in_use)
        after = block.after = self._not_over(block.after)
        return Slot(self._arenas[arena][begin : begin + nbytes], arena, begin, begin + length, list(after))

    def give(self, slot: Slot, after: list[Event]) -> None:
        """Takes a slot back; its next user waits for `after`."""
        self.in_use -= slot.end - slot.begin
        free = self._free[slot.arena]
        block = _Free(slot.begin, slot.end, self._not_over([*slot.after, *after]))
        for other in [b for b in free if b.end == block.begin or b.begin == block.end]:
            free.remove(other)
            both = self._not_over(block.after + other.after)
            block = _Free(min(block.begin, other.begin), max(block.end, other.end), both)
        insort(free, block)

    def _not_over(self, events: list[Event]) -> list[Event]:
        """Each once: parts of one block carry the same events, and come together again."""
        return [event for event in {id(event): event for event in events}.values() if not self._done(event)]

    def reserve(self, nbytes: int) -> int:
        """Pins until `nbytes` are pinned, or the budget or the machine says no. Returns the bytes pinned."""
        while self.pinned < nbytes and self._grow(min(self._arena_bytes, nbytes - self.pinned)):
            pass
        return self.pinned

    def rehearse(self, uses: Sequence[tuple[int, int, int]]) -> int:
        """Pins now what slots of (bytes, begin, end) will need, begin and end being times in any unit. Returns the
        bytes that found no place."""
        order = [(begin, 1, i) for i, (_, begin, _) in enumerate(uses)] + [
            (e, 0, i) for i, (_, _, e) in enumerate(uses)
        ]
        slots: dict[int, Slot | None] = {}
        missing = 0
        in_use, peak = self.in_use, self.peak
        for _, begins, i in sorted(order):
            if begins:
                slots[i] = self.take(uses[i][0])
                missing += uses[i][0] if slots[i] is None else 0
            elif (slot := slots.pop(i)) is not None:
                self.give(slot, slot.after)
        assert self.in_use == in_use
        self.peak = peak
        return missing

    def _smallest(self, length: int) -> tuple[int, _Free] | None:
        fitting = [
            (block.end - block.begin, arena, block.begin, block)
            for arena, free in enumerate(self._free)
            for block in free
            if block.end - block.begin >= length
        ]
        if not fitting:
            return None
        _, arena, _, block = min(fitting, key=lambda item: item[:3])
        return arena, block

    def _grow(self, length: int) -> bool:
        """One more arena that holds at least `length`."""
        left = self.budget - self.pinned
        size = self._arena_bytes
        while size < length:
            size *= 2
        while size > left and size // 2 >= max(length, ALIGNMENT):
            size //= 2
        if size > left or self.refusal is not None:
            return False
        while True:
            try:
                memory = self._allocate(size)
                break
            except RuntimeError as error:
                if size // 2 < max(length, ALIGNMENT):
                    self.refusal = f"no pinned host memory beyond {self.pinned:,} bytes: {error}"
                    return False
                size //= 2
        self.pinned += size
        self._arenas.append(memory)
        self._free.append([_Free(0, size, [])])
        return True


def _power_of_two_below(n: int) -> int:
    return 1 << (n.bit_length() - 1)
