"""Packs and unpacks what autograd saves, and carries a plan out.

Whatever the plan says, an unpacked tensor is there and right: a copy back waits for its own copy out, the compute
stream waits for the copy back, and a tensor that the plan does not know is kept or, for want of room, moved in plain
order. A wrong plan costs time.

At each hook everything that is due by the operator count is done (`_advance`): tensors whose operator has come leave
the device, copies back are started.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from slimpipe.swap.arena import PinnedArenas
from slimpipe.swap.excluded import Excluded
from slimpipe.swap.execution import ExecutionPlan
from slimpipe.swap.features import Feature, Matcher
from slimpipe.swap.geometry import Layout, bytes_of, range_to_move, view_of
from slimpipe.swap.observer import Observer
from slimpipe.swap.references import references
from slimpipe.swap.release import Holder, ReleaseQueue
from slimpipe.swap.report import Counts
from slimpipe.swap.saved import Saved, SavedReference, State, View
from slimpipe.swap.streams import Streams

if TYPE_CHECKING:
    from slimpipe.swap.recorder import Recorder

NEVER = float("inf")
LOOKAHEAD = 2
"""Tensors fetched ahead of the one asked for where no plan says when."""

Kept = tuple[Tensor, int]
"""A tensor that is never moved: (detached alias, version when it was saved)."""


class Executor:
    """`gpu_budget`: bytes above which tensors are moved though no plan says so; `headroom` bytes less of it are used
    where there is no plan."""

    def __init__(
        self,
        streams: Streams,
        arenas: PinnedArenas,
        excluded: Excluded,
        holder: Holder,
        gpu_budget: int,
        headroom: int,
        min_bytes: int,
    ) -> None:
        self.streams, self.arenas, self.excluded, self.holder = streams, arenas, excluded, holder
        self.gpu_budget, self.headroom, self.min_bytes = gpu_budget, headroom, min_bytes
        self.observer: Observer | None = None
        self.counts = Counts()
        self.generation = 0
        self.away_bytes = 0
        self.features: list[Feature] = []
        """Of the large tensors saved in this step, as they came."""
        self.most_in_use = 0
        """Bytes on the device, seen when large tensors were saved in this step."""
        self.stalls: list[tuple[Any, Any]] = []
        self._this_step: list[SavedReference] = []
        """As `features`."""
        self._lock = threading.RLock()
        self._plan: ExecutionPlan | None = None
        self._recorder: Recorder | None = None
        self._matcher = Matcher(())
        self._others: Sequence[ExecutionPlan] = ()
        self._drift = 0
        self._due: float = NEVER
        self._releases = ReleaseQueue()
        self._fetches: deque[tuple[int, int]] = deque()
        self._numbered: dict[int, SavedReference] = {}
        self._known: dict[Any, SavedReference] = {}
        self._all: dict[int, SavedReference] = {}
        self._serial = 0
        self._retired: deque[tuple[Any, ...]] = deque()
        self._seen: list[StorageWeakRef] = []
        self._holders: Counter[int] = Counter()
        """By storage: how many `Saved` keep it alive."""

    # A step

    def begin(
        self, observer: Observer, plan: ExecutionPlan | None, others: Sequence[ExecutionPlan], recorder: Recorder | None
    ) -> None:
        """`others`: plans to go over to if the step turns out to be theirs."""
        with self._lock:
            self.settle()
            self._learn_what_lasts()
        self.generation += 1
        self.observer, self._recorder, self._others = observer, recorder, others
        self.features, self._this_step = [], []
        self.most_in_use = 0
        self._numbered = {}
        self._follow(plan)

    def end(self) -> None:
        """Nothing of the step is left pending: what was to leave has left, and no plan applies any more."""
        with self._lock:
            for saved in self._releases.clear():
                self._release(saved)
            self._plan, self._recorder, self._others = None, None, ()
            self._fetches.clear()
            self._numbered, self._due = {}, NEVER
            self.settle()

    def _learn_what_lasts(self) -> None:
        """Storages of the last step that others hold still: tables, data, no activations."""
        for reference in self._seen:
            if self._referred_to(reference, self._holders[reference.cdata]):
                self.excluded.add_reference(reference)
        self._seen.clear()
        self.excluded.forget_dead()

    def _follow(self, plan: ExecutionPlan | None) -> None:
        self._plan, self._drift = plan, 0
        self._matcher = Matcher(plan.expected if plan is not None else ())
        swaps = plan.swaps if plan is not None else {}
        self._fetches = deque(sorted((times.prefetch, number) for number, times in swaps.items()))
        self._set_due()

    # The two hooks

    def pack(self, tensor: Tensor) -> Kept | View | Tensor:
        """What autograd keeps in the tensor's stead."""
        observer = self.observer
        assert observer is not None
        operator = observer.at_hook("save")
        if operator >= self._due or self._recorder is not None:
            self._advance(operator)
        if not self._may_move(tensor):
            return self._keep(tensor)
        with self._lock, observer.paused():
            self.settle()
            self._release_done()
            return self._pack(tensor, operator)

    def unpack(self, packed: Kept | View | Tensor) -> Tensor:
        assert self.observer is not None
        operator = self.observer.at_hook("load")
        if operator >= self._due or self._recorder is not None:
            self._advance(operator)
        if isinstance(packed, View):
            with self._lock, self._uncounted():
                return self._unpack(packed)
        if isinstance(packed, Tensor):
            return packed
        tensor, version = packed
        if tensor._version != version:
            raise _modified(tensor.shape, tensor.dtype, version, tensor._version)
        return tensor

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
        if tensor.device != self.streams.device or tensor.nbytes < self.min_bytes or tensor.dim() == 0:
            return False
        # The bits of lazily conjugated and negated tensors are not in their bytes.
        return not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_inference())

    def _pack(self, tensor: Tensor, operator: int) -> Kept | View | Tensor:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a function transform's wrapper
            return self._keep(tensor)
        if self.excluded.holds(tensor, storage):
            return self._keep(tensor)
        layout = Layout.of(tensor)
        storage_bytes = storage.nbytes()
        begin, end = range_to_move(layout, storage_bytes)
        if end - begin < self.min_bytes or end > storage_bytes:  # expanded, or a storage that was shrunk
            return self._keep(tensor)
        version = tensor._version
        saved = self._shared(storage, version, layout)
        if saved is None:
            saved = self._new(tensor, storage, version, begin, end - begin, operator)
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

    def _new(
        self, tensor: Tensor, storage: torch.UntypedStorage, version: int, begin: int, nbytes: int, operator: int
    ) -> Saved:
        assert self.observer is not None
        self._serial += 1
        saved = Saved(tensor.detach(), StorageWeakRef(storage), version, begin, nbytes, self._retire)
        saved.serial, saved.generation = self._serial, self.generation
        saved.key = (storage._cdata, version, storage.data_ptr(), storage.nbytes())
        saved.feature = Feature(tuple(tensor.shape), tensor.dtype, nbytes, self.observer.last())
        saved.source = tensor.grad_fn.name() if tensor.grad_fn is not None else "input"
        reference = weakref.ref(saved)
        self._known[saved.key] = self._all[saved.serial] = reference
        self._seen.append(saved.reference)
        self._holders[saved.reference.cdata] += 1
        self.streams.watch(storage)
        self.holder.compute_streams(self.streams)
        self.features.append(saved.feature)
        self._this_step.append(reference)
        saved.number = self._number(saved, saved.feature, operator)
        if saved.number is not None:
            self._numbered[saved.number] = reference
        if self._recorder is not None:
            self._recorder.born(saved, len(self.features) - 1, operator)
        self._decide(saved)
        return saved

    def _number(self, saved: Saved, feature: Feature, operator: int) -> int | None:
        """The tensor's place in the sequence that the plan is for."""
        number = self._matcher.match(feature)
        missed = len(self.features) - self._matcher.exact
        # At the first, second, fourth... that does not fit: in a mixture of experts most never do.
        if missed & (missed - 1) == 0 and missed and self._change_plan():
            return saved.number
        plan = self._plan
        if plan is None:
            return None
        if number is not None:
            # Operators inserted or left out since then shift what is still to come by as much.
            self._drift = operator - plan.packed_at[number]
            self._set_due()
            return number
        self.counts.problem("mismatches", saved.origin)
        return None

    def _change_plan(self) -> bool:
        """Goes over to the cached plan that follows the step so far to the letter, if there is one."""
        for plan in self._others:
            if plan is not self._plan and list(plan.expected[: len(self.features)]) == self.features:
                break
        else:
            return False
        self._numbered = {}
        self._follow(plan)
        for feature, reference in zip(self.features, self._this_step, strict=True):
            number, saved = self._matcher.match(feature), reference()
            if number is None or saved is None:
                continue
            saved.number = number
            self._numbered[number] = reference
            # The last one is new: where it goes is decided by who asked.
            if number in plan.swaps and saved.state is State.HERE and not saved.used and saved.serial != self._serial:
                self._decide(saved)
        return True

    # Where a tensor goes

    def _decide(self, saved: Saved) -> None:
        plan = self._plan
        times = plan.swaps.get(saved.number) if plan is not None and saved.number is not None else None
        if times is not None:
            saved.planned = True
            if self._start_copy(saved):
                self.counts.planned_out += saved.nbytes
                self._releases.add(saved, times.release)
                self._set_due()
            return
        planned_to_stay = plan is not None and saved.number is not None
        limit = self.gpu_budget - (0 if planned_to_stay else self.headroom)
        in_use = self.streams.memory_in_use()
        self.most_in_use = max(self.most_in_use, in_use)
        if in_use <= limit:
            return
        # Those that were started earlier make room first: their copies are further on.
        while len(self._releases) and self.streams.memory_in_use() > limit:
            self._release_next()
        if self.streams.memory_in_use() <= limit:
            return
        self.counts.problem("fallbacks", saved.origin)
        if self._start_copy(saved):
            self._releases.add(saved, NEVER)

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

    def _release_next(self) -> None:
        saved = self._releases.pop()
        if saved is not None:
            self._release(saved)

    def _release_done(self) -> None:
        """Lets go of tensors without a planned operator whose copies are over."""
        while self._releases.next_operator == NEVER and len(self._releases):
            saved = self._releases.first()
            if saved is not None and saved.out_event is not None and not self.streams.done(saved.out_event):
                return
            self._release_next()

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
                begin = self.streams.mark()
                self.streams.wait_everywhere(saved.out_event)
                self.stalls.append((begin, self.streams.mark()))
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
            if self._recorder is not None and saved.generation == self.generation:
                self._recorder.first_used(saved)
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
        if self._plan is None or saved.number is None:
            self._fetch_ahead(saved)
        return result

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
            raise _modified(view.layout.size, view.layout.dtype, *saved.changed)

    def _bring_back(self, saved: Saved) -> Tensor:
        """uint8 on the device; the current compute stream waits for it."""
        if saved.restored is None:
            self.counts.late_fetches += 1
            self.counts.fetched_late += saved.nbytes
            self._copy_in(saved, self._allocate(saved.nbytes))
        assert saved.restored is not None
        if not self.streams.done(saved.in_event):
            begin = self.streams.mark()
            self.streams.wait(saved.in_event)
            self.stalls.append((begin, self.streams.mark()))
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
        """Room on the device, in the order of DESIGN.md section 7: free space, copies under way, the allocator's cache,
        other saved tensors."""
        for relief in (None, self.drain, self.streams.free_cached, lambda: self.evict(nbytes)):
            if relief is not None:
                relief()
            try:
                return self.streams.empty(nbytes)
            except torch.OutOfMemoryError:
                self.counts.out_of_memory += 1
        return self.streams.empty(nbytes)

    def _fetch(self, saved: Saved, only_into_room: bool) -> bool:
        """Starts a copy back ahead of time, if there is room."""
        if saved.state is not State.AWAY or saved.used or saved.changed is not None:
            return False
        if only_into_room and self.streams.memory_in_use() + saved.nbytes > self.gpu_budget:
            return False
        try:
            target = self.streams.empty(saved.nbytes)
        except torch.OutOfMemoryError:
            return False
        self.counts.prefetches += 1
        self._copy_in(saved, target)
        return True

    def _fetch_ahead(self, asked: Saved) -> None:
        """Without a plan: the backward will most likely ask for what was saved just before."""
        fetched = 0
        for serial in range(asked.serial - 1, max(0, asked.serial - 64), -1):
            reference = self._all.get(serial)
            saved = reference() if reference is not None else None
            if saved is None or saved.state is State.HERE or saved.used:
                continue
            if saved.state is State.AWAY and not self._fetch(saved, only_into_room=True):
                return
            fetched += 1
            if fetched == LOOKAHEAD:
                return

    # What is due

    def at_operator(self, operator: int) -> None:
        """For observers that see every operator."""
        if operator >= self._due:
            self._advance(operator)

    def _advance(self, operator: int) -> None:
        assert self.observer is not None
        with self._lock, self.observer.paused():
            self.streams.at_operator(operator)
            self.settle()
            now = operator - self._drift
            while self._releases.next_operator <= now:
                self._release_next()
            while self._fetches and self._fetches[0][0] <= now:
                reference = self._numbered.get(self._fetches.popleft()[1])
                saved = reference() if reference is not None else None
                if saved is not None:
                    self._fetch(saved, only_into_room=False)
            self._set_due()
            if self._recorder is not None:
                self._recorder.moment(operator, self.away_bytes)

    def _set_due(self) -> None:
        first = min(self._releases.next_operator, self._fetches[0][0] if self._fetches else NEVER)
        self._due = first + self._drift

    # Memory

    def _uncounted(self) -> AbstractContextManager[None]:
        return self.observer.paused() if self.observer is not None else nullcontext()

    def drain(self) -> int:
        """Lets go of everything that is leaving, now. Returns how many tensors."""
        with self._lock, self._uncounted():
            leaving = self._releases.clear()
            for saved in leaving:
                self._release(saved)
            self._set_due()
            self.settle()
            return len(leaving)

    def evict(self, nbytes: int) -> int:
        """Moves saved tensors out, those needed last first, and waits for it. Returns the bytes moved."""
        moved = 0
        with self._lock, self._uncounted():
            for reference in list(self._all.values()):
                if moved >= nbytes:
                    break
                saved = reference()
                if saved is None or saved.state is not State.HERE or saved.used or not self._start_copy(saved):
                    continue
                self._release(saved)
                self.counts.evicted += 1
                moved += saved.nbytes
        return moved

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
                self.arenas.give(slot, events)

    # For tests and reports

    def live(self) -> int:
        """Large saved tensors that autograd keeps."""
        return sum(1 for reference in list(self._all.values()) if reference() is not None)

    def sizes(self) -> dict[str, int]:
        return {
            "saved": len(self._all),
            "known": len(self._known),
            "releases": len(self._releases),
            "retired": len(self._retired),
            "away_bytes": self.away_bytes,
            "stalls": len(self.stalls),
            "holders": len(self._holders),
        }

    def largest(self, count: int) -> list[tuple[str, int, str]]:
        """(origin, bytes, state) of the largest saved tensors."""
        alive = [saved for reference in list(self._all.values()) if (saved := reference()) is not None]
        alive.sort(key=lambda saved: -saved.nbytes)
        return [(saved.origin, saved.nbytes, saved.state.value) for saved in alive[:count]]


def _modified(size: Sequence[int], dtype: torch.dtype, expected: int, found: int) -> RuntimeError:
    how = "its storage was resized" if found == -1 else f"it is at version {found}, but was saved at version {expected}"
    return RuntimeError(
        f"a tensor that autograd saved for the backward ({dtype}, {list(size)}) was written to in place: {how}. Its "
        "gradient would be wrong. torch.autograd.set_detect_anomaly(True) names the operation."
    )
