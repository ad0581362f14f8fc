"""Activations to the host and back by units of work that the caller names: what a pipeline's engine moves with.

    with swaps.saving("F0.3"):  ...                 # a forward, on the compute stream
    swaps.offload("F0.3")                           # its copies to the host start
    swaps.vacate("F0.3")                            # compute waits for them; the memory is free
    swaps.reload("F0.3")                            # memory is taken, and the copies back start
    ...                                             # the backward waits for each tensor as it asks for it

Nothing here waits on the host. Whatever is left out of these calls, the backward gets the right tensors: a call less
costs memory or time. Host memory is pinned beforehand (`pin`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Final

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from slimpipe.swap.arena import PinnedArenas
from slimpipe.swap.excluded import Excluded
from slimpipe.swap.geometry import ALIGNMENT
from slimpipe.swap.mover import Kept, Mover
from slimpipe.swap.release import PythonHolder
from slimpipe.swap.saved import Saved, SavedReference, State, View
from slimpipe.swap.streams import Event, Streams

ARENA_BYTES: Final = 1 << 30

Waiting = Callable[[bool], AbstractContextManager[None]]
"""(inward) -> what measures a wait of the compute stream for copies back, or for copies out."""


class UnitSwaps(Mover):
    """`modules`: their parameters and buffers stay. `host_budget`: bytes that may be pinned; None: any number.
    `waiting` goes around each wait of the compute stream."""

    def __init__(
        self,
        streams: Streams,
        modules: Iterable[nn.Module],
        weights: Iterable[Tensor],
        min_bytes: int,
        host_budget: int | None,
        waiting: Waiting,
        arena_bytes: int = ARENA_BYTES,
    ) -> None:
        budget = 1 << 62 if host_budget is None else host_budget
        arenas = PinnedArenas(streams.host_memory, streams.done, budget, arena_bytes)
        super().__init__(streams, arenas, Excluded(), PythonHolder(), min_bytes)
        for module in modules:
            self.excluded.add_module(module)
        for weight in weights:
            self.excluded.add(weight)
        self._measure = waiting
        self._units: dict[Hashable, list[SavedReference]] = {}
        self._into: list[SavedReference] = []
        self.moved_out = self.moved_in = self.kept = 0
        """Bytes since `begin`; `kept`: of those meant to move, for want of host memory."""

    def pin(self, uses: Sequence[tuple[int, int, int]]) -> str | None:
        """Pins what slots of (bytes, begin, end) need, begin and end in any unit of time. What was in the way, if
        anything was."""
        missing = self.arenas.rehearse(uses)
        if not missing:
            self._copy_once()
            return None
        reason = self.arenas.refusal or f"at most {self.arenas.budget:,} bytes may be pinned"
        return f"{missing:,} bytes found no place in pinned host memory: {reason}"

    def _copy_once(self) -> None:
        """What a first copy sets up is not left to a step."""
        slot = self.arenas.take(ALIGNMENT)
        if slot is not None:
            block = self.streams.empty(ALIGNMENT)
            out = self.streams.copy_out(block, slot.memory, [])
            self.streams.synchronize(self.streams.copy_in(slot.memory, block, [out]))
            self.arenas.give(slot, [])

    def begin(self, *lasting: Tensor) -> None:
        """Before a step. `lasting`: tensors that the caller holds throughout, its data: moving them would free
        nothing."""
        self.settle()
        self.excluded.forget_dead()
        for tensor in lasting:
            self.excluded.add(tensor)
        self._units.clear()
        self.moved_out = self.moved_in = self.kept = 0

    def end(self) -> None:
        """Behind a step: host memory of what the backward has dropped is free again."""
        with self._lock:
            self.settle()

    @contextmanager
    def saving(self, unit: Hashable) -> Iterator[None]:
        """What autograd saves inside is the unit's."""
        self._into = self._units[unit] = []
        # Units share nothing: each leaves and comes by itself.
        self.generation += 1
        with saved_tensors_hooks(self.pack, self.unpack):
            yield

    def sizes(self, unit: Hashable) -> list[int]:
        """Bytes of the unit's tensors that can move, in the order in which they are moved."""
        return [saved.nbytes for saved in self._saved(unit)]

    def forget(self, unit: Hashable) -> None:
        """The unit is not to be moved after all; its tensors stay with autograd as long as that needs them."""
        del self._units[unit]

    def offload(self, unit: Hashable) -> None:
        self.settle()
        for saved in self._saved(unit):
            saved.planned = True
            if saved.state is State.HERE and not saved.used:
                if self._start_copy(saved):
                    self.moved_out += saved.nbytes
                else:
                    self.kept += saved.nbytes

    def vacate(self, unit: Hashable) -> None:
        with self._measure(False):
            for saved in self._saved(unit):
                self._release(saved)

    def reload(self, unit: Hashable) -> None:
        # The backward asks for what was saved last first.
        for saved in reversed(self._saved(unit)):
            if self._fetch(saved):
                self.moved_in += saved.nbytes
        del self._units[unit]

    def left_over(self) -> list[Hashable]:
        """Units that were saved and not reloaded."""
        return list(self._units)

    # The hooks

    def pack(self, tensor: Tensor) -> Kept | View | Tensor:
        if not self._may_move(tensor):
            return self._keep(tensor)
        with self._lock:
            return self._pack(tensor)

    def unpack(self, packed: Kept | View | Tensor) -> Tensor:
        with self._lock:
            return self._load(packed)

    def _born(self, saved: Saved, tensor: Tensor) -> None:
        self._into.append(self._all[saved.serial])

    def _saved(self, unit: Hashable) -> list[Saved]:
        """Those that autograd still keeps."""
        return [saved for reference in self._units[unit] if (saved := reference()) is not None]

    def _before_reuse(self, events: list[Event]) -> list[Event]:
        # The backward that dropped the tensor has waited for these, and copies out wait for all that compute was given:
        # hundreds of events a slot would pile up else, while the host runs ahead of the device.
        for event in events:
            self.streams.wait(event)
        return []

    @contextmanager
    def _waiting(self, inward: bool) -> Iterator[None]:
        # `vacate` measures its waits as one.
        if not inward:
            yield
            return
        with self._measure(True):
            yield
