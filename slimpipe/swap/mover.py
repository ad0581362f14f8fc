"""Moves what autograd saves to the host and back, and gives it back right: the part that must not err.

Whatever is decided elsewhere, an unpacked tensor is there and right: a copy back waits for its own copy out, the
compute stream waits for the copy back, and what cannot be moved, or finds no room on the host, is kept. `Executor`
decides by operators, `UnitSwaps` by actions of a pipeline's schedule; a wrong decision costs time.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from slimpipe.swap.arena import PinnedArenas
from slimpipe.swap.excluded import Excluded
from slimpipe.swap.geometry import Layout, bytes_of, range_to_move, view_of
from slimpipe.swap.references import references
from slimpipe.swap.release import Holder
from slimpipe.swap.report import Counts
from slimpipe.swap.saved import Saved, SavedReference, State, View
from slimpipe.swap.streams import Event, Streams

Kept = tuple[Tensor, int]
"""A tensor that is never moved: (detached alias, version when it was saved)."""


class Mover:
    """Tensors of fewer than `min_bytes` bytes, and those that `excluded` holds, stay."""

    def __init__(
        self, streams: Streams, arenas: PinnedArenas, excluded: Excluded, holder: Holder, min_bytes: int
    ) -> None:
        self.streams, self.arenas, self.excluded, self.holder = streams, arenas, excluded, holder
        self.min_bytes = self.least = min_bytes
        """`least`: below it a tensor is not even looked at; some steps look at tensors that are too small to move."""
        self.counts = Counts()
        self.generation = 0
        """Tensors saved in one generation share what they have in common."""
        self.away_bytes = 0
        self.stalls: list[tuple[Any, Any]] = []
        self._lock = threading.RLock()
        self._known: dict[Any, SavedReference] = {}
        self._all: dict[int, SavedReference] = {}
        self._serial = 0
        self._retired: deque[tuple[Any, ...]] = deque()
        self._holders: Counter[int] = Counter()
        """By storage: how many `Saved` keep it alive."""

    # What autograd keeps

    @staticmethod
    def _keep(tensor: Tensor) -> Kept | Tensor:
        # A detached alias: returning a node's own output would make a cycle through its graph, a leak if its backward
        # never runs.
        alias = tensor.detach()
        try:
            return alias, alias._version
        except RuntimeError:  # inference tensors have no version
            return alias

    def _may_move(self, tensor: Tensor) -> bool:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return False
        if tensor.device != self.streams.device or tensor.nbytes < self.least or tensor.dim() == 0:
            return False
        # The bits of lazily conjugated and negated tensors are not in their bytes.
        return not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_inference())

    def _pack(self, tensor: Tensor) -> Kept | View | Tensor:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a function transform's wrapper
            return self._keep(tensor)
        if self.excluded.holds(tensor, storage):
            return self._keep(tensor)
        layout = Layout.of(tensor)
        storage_bytes = storage.nbytes()
        begin, end = range_to_move(layout, storage_bytes)
        if end - begin < self.least or end > storage_bytes:  # expanded, or a storage that was shrunk
            return self._keep(tensor)
        if tensor.nbytes < self.min_bytes <= storage_bytes:  # a small part of something large
            return self._keep(tensor)
        version = tensor._version
        saved = self._shared(storage, version, layout)
        if saved is None:
            saved = self._new(tensor, storage, version, begin, end - begin)
        saved.waiting += 1
        return View(saved, layout)

    def _shared(self, storage: torch.UntypedStorage, version: int, layout: Layout) -> Saved | None:
        """A `Saved` of the same storage, at the same version, that covers the tensor."""
        reference = self._known.get((storage._cdata, version, storage.data_ptr(), storage.nbytes()))
        saved = reference() if reference is not None else None
        if saved is None or saved.generation != self.generation or saved.changed is not None:
            return None
        begin, end = layout.span()
        return saved if saved.begin <= begin and end <= saved.begin + saved.nbytes else None

    def _new(self, tensor: Tensor, storage: torch.UntypedStorage, version: int, begin: int, nbytes: int) -> Saved:
        self._serial += 1
        saved = Saved(tensor.detach(), StorageWeakRef(storage), version, begin, nbytes, self._retire)
        saved.serial, saved.generation = self._serial, self.generation
        saved.key = (storage._cdata, version, storage.data_ptr(), storage.nbytes())
        saved.source = tensor.grad_fn.name() if tensor.grad_fn is not None else "input"
        self._known[saved.key] = self._all[saved.serial] = weakref.ref(saved)
        self._holders[saved.reference.cdata] += 1
        self.streams.watch(storage)
        self.holder.compute_streams(self.streams)
        self._born(saved, tensor)
        return saved

    def _born(self, saved: Saved, tensor: Tensor) -> None:
        """`tensor` was saved as `saved`: decides where it goes."""
        raise NotImplementedError

    def _load(self, packed: Kept | View | Tensor) -> Tensor:
        """What a hook gives back for what `_pack` or `_keep` made."""
        if isinstance(packed, View):
            return self._unpack(packed)
        if isinstance(packed, Tensor):
            return packed
        tensor, version = packed
        if tensor._version != version:
            raise modified(tensor.shape, tensor.dtype, version, tensor._version)
        return tensor

    # The way out

    def _start_copy(self, saved: Saved) -> bool:
        assert saved.original is not None
        slot = self.arenas.take(saved.nbytes)
        if slot is None:
            self.counts.no_host_room += 1
            return False
        storage = saved.original.untyped_storage()
        source = bytes_of(storage, saved.begin, saved.begin + saved.nbytes)
        saved.slot = slot
        saved.out_event = self.streams.copy_out(source, slot.memory, slot.after)
        saved.held = self.holder.hold(saved.original, saved.out_event)
        saved.original = None
        saved.state = State.LEAVING
        self.counts.moved_out += saved.nbytes
        self.counts.moves_out += 1
        return True

    def _release(self, saved: Saved) -> None:
        """Lets a tensor go whose copy was started: the compute streams wait for the copy, the reference is dropped."""
        if saved.state is not State.LEAVING or saved.held is None:
            return
        original = self.holder.take(saved.held)
        if original is None:
            self.counts.drained_early += 1
            found = self.holder.version_when_drained(saved.held)
        else:
            found = original._version
            if not self.streams.done(saved.out_event):
                with self._waiting(inward=False):
                    self.streams.wait_everywhere(saved.out_event)
            storage = original.untyped_storage()
            if (storage.data_ptr(), storage.nbytes()) != saved.key[2:]:
                found = -1  # resized or replaced while the copy ran
            del storage
        if found != saved.version:
            saved.changed = (saved.version, found)
            self.counts.modified += 1
        saved.held = None
        saved.state, saved.missing = State.AWAY, True
        self.away_bytes += saved.nbytes
        del original
        self._holders[saved.reference.cdata] -= 1
        # Other ranges of the same storage, on their way or yet to go, are the plan's business.
        if saved.planned and self._referred_to(saved.reference, self._holders[saved.reference.cdata]):
            self.counts.still_referenced += saved.nbytes

    def _referred_to(self, reference: StorageWeakRef, own: int = 0) -> bool:
        """Whether someone else refers to the storage, `own` references beside."""
        if reference.expired():
            return False
        return references(reference.cdata) > own + self.streams.aliases(reference.cdata)

    # The way back

    def _unpack(self, view: View) -> Tensor:
        saved = view.saved
        if not saved.used:
            saved.used = True
            self._first_used(saved)
        original = self._original(saved)
        if original is not None:
            if original._version != saved.version:
                saved.changed = (saved.version, original._version)
            self._check(saved, view)
            same = view.layout == Layout.of(original)
            result = original if same else view_of(original.untyped_storage(), view.layout, 0)
        else:
            self._check(saved, view)
            restored = self._bring_back(saved)
            result = view_of(restored.untyped_storage(), view.layout, saved.begin)
        if not view.unpacked:
            view.unpacked = True
            saved.waiting -= 1
        if saved.waiting == 0 and saved.restored is not None:
            # The backward that asked holds it now. Another unpack (retain_graph) copies it in again.
            saved.restored, saved.state = None, State.AWAY
        return result

    def _first_used(self, saved: Saved) -> None:
        """The backward asks for it for the first time."""

    def _original(self, saved: Saved) -> Tensor | None:
        """The original where it is on the device still. One that is leaving goes on leaving."""
        if saved.state is not State.LEAVING:
            return saved.original
        assert saved.held is not None
        original = self.holder.take(saved.held)
        if original is None:
            self._release(saved)
            return None
        saved.held = self.holder.hold(original, saved.out_event)
        return original

    def _check(self, saved: Saved, view: View) -> None:
        if saved.changed is not None:
            raise modified(view.layout.size, view.layout.dtype, *saved.changed)

    def _bring_back(self, saved: Saved) -> Tensor:
        """uint8 on the device; the current compute stream waits for it."""
        if saved.restored is None:
            self.counts.late_fetches += 1
            self.counts.fetched_late += saved.nbytes
            self._copy_in(saved, self._allocate(saved.nbytes))
        assert saved.restored is not None
        if not self.streams.done(saved.in_event):
            with self._waiting(inward=True):
                self.streams.wait(saved.in_event)
        self.streams.use_here(saved.restored, saved.restored_on)
        return saved.restored

    def _copy_in(self, saved: Saved, target: Tensor) -> None:
        assert saved.slot is not None
        saved.restored, saved.restored_on = target, self.streams.current()
        # A copy back may be asked for while the copy out still runs: it waits for that one, always.
        saved.in_event = self.streams.copy_in(saved.slot.memory, target, [saved.out_event])
        saved.state = State.COMING
        if saved.missing:
            saved.missing = False
            self.away_bytes -= saved.nbytes
        self.counts.moved_in += saved.nbytes

    def _allocate(self, nbytes: int) -> Tensor:
        """Room on the device: free space, or else what `_reliefs` make, one after another."""
        for relief in (None, *self._reliefs(nbytes)):
            if relief is not None:
                relief()
            try:
                return self.streams.empty(nbytes)
            except torch.OutOfMemoryError:
                self.counts.out_of_memory += 1
        return self.streams.empty(nbytes)

    def _reliefs(self, nbytes: int) -> Sequence[Callable[[], Any]]:
        return (self.streams.free_cached,)

    def _fetch(self, saved: Saved) -> bool:
        """Starts a copy back ahead of time, if there is room."""
        if saved.state is not State.AWAY or saved.used or saved.changed is not None:
            return False
        try:
            target = self.streams.empty(saved.nbytes)
        except torch.OutOfMemoryError:
            return False
        self.counts.prefetches += 1
        self._copy_in(saved, target)
        return True

    @contextmanager
    def _waiting(self, inward: bool) -> Iterator[None]:
        """Around each wait of the compute stream for a copy."""
        begin = self.streams.mark()
        yield
        self.stalls.append((begin, self.streams.mark()))

    # What was dropped

    def _retire(self, saved: Saved) -> None:
        """Autograd has dropped the tensor. Called at any time, by the garbage collector too: only takes note."""
        leaving = None if saved.held is None else (saved.held, saved.out_event)
        coming = None if saved.restored is None else (saved.restored, saved.in_event)
        events = [event for event in (saved.out_event, saved.in_event) if event is not None]
        missing = saved.nbytes if saved.missing else 0
        holding = int(saved.original is not None or saved.held is not None)
        self._retired.append((saved.serial, saved.key, holding, missing, leaving, coming, saved.slot, events))

    def settle(self) -> None:
        """Gives back what dropped tensors had on the host, and on the device where a copy ran."""
        while self._retired:
            serial, key, holding, missing, leaving, coming, slot, events = self._retired.popleft()
            self._all.pop(serial, None)
            self._holders[key[0]] -= holding
            if self._holders[key[0]] <= 0:
                del self._holders[key[0]]
            reference = self._known.get(key)
            if reference is not None and reference() is None:
                del self._known[key]
            self.away_bytes -= missing
            # Memory that a copy reads or writes still must not be used again before that.
            if leaving is not None:
                original = self.holder.take(leaving[0])
                if original is None:
                    self.holder.version_when_drained(leaving[0])
                else:
                    self.streams.wait_everywhere(leaving[1])
                del original
            if coming is not None:
                self.streams.wait_everywhere(coming[1])
            if slot is not None:
                self.arenas.give(slot, self._before_reuse(events))

    def _before_reuse(self, events: list[Event]) -> list[Event]:
        """Of the copies that read a slot or wrote it: what its next user has to wait for."""
        return events

    # For tests and reports

    def live(self) -> int:
        """Large saved tensors that autograd keeps."""
        return sum(1 for reference in list(self._all.values()) if reference() is not None)

    def largest(self, count: int) -> list[tuple[str, int, str]]:
        """(origin, bytes, state) of the largest saved tensors."""
        alive = [saved for reference in list(self._all.values()) if (saved := reference()) is not None]
        alive.sort(key=lambda saved: -saved.nbytes)
        return [(saved.origin, saved.nbytes, saved.state.value) for saved in alive[:count]]


def modified(size: Sequence[int], dtype: torch.dtype, expected: int, found: int) -> RuntimeError:
    how = "its storage was resized" if found == -1 else f"it is at version {found}, but was saved at version {expected}"
    return RuntimeError(
        f"a tensor that autograd saved for the backward ({dtype}, {list(size)}) was written to in place: {how}. Its "
        "gradient would be wrong. torch.autograd.set_detect_anomaly(True) names the operation."
    )
