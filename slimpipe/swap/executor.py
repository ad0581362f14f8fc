"""Carries out a plan that goes by operators: what `SwapManager` moves with.

A tensor that the plan does not know is kept or, for want of room, moved in plain order. At each hook everything that is
due by the operator count is done (`_advance`): tensors whose operator has come leave the device, copies back are
started.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from slimpipe.swap.arena import PinnedArenas
from slimpipe.swap.excluded import Excluded
from slimpipe.swap.execution import ExecutionPlan
from slimpipe.swap.features import Feature, Matcher
from slimpipe.swap.mover import Kept, Mover
from slimpipe.swap.observer import Observer
from slimpipe.swap.release import Holder, ReleaseQueue
from slimpipe.swap.saved import Saved, SavedReference, State, View
from slimpipe.swap.streams import Streams

if TYPE_CHECKING:
    from slimpipe.swap.recorder import Recorder

NEVER = float("inf")
LOOKAHEAD = 2
"""Tensors fetched ahead of the one asked for where no plan says when."""


class Executor(Mover):
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
        super().__init__(streams, arenas, excluded, holder, min_bytes)
        self.gpu_budget, self.headroom = gpu_budget, headroom
        self.observer: Observer | None = None
        self.features: list[Feature] = []
        """Of the large tensors saved in this step, as they came."""
        self.most_in_use = 0
        """Bytes on the device, seen when large tensors were saved in this step."""
        self._this_step: list[SavedReference] = []
        """As `features`."""
        self._plan: ExecutionPlan | None = None
        self._recorder: Recorder | None = None
        self._matcher = Matcher(())
        self._others: Sequence[ExecutionPlan] = ()
        self._drift = 0
        self._due: float = NEVER
        self._releases = ReleaseQueue()
        self._fetches: deque[tuple[int, int]] = deque()
        self._numbered: dict[int, SavedReference] = {}
        self._seen: list[StorageWeakRef] = []
        self._operator = 0
        """At the hook that is being called."""

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
        # In the order in which the policy counted on the link: of those started at once, the first needed first.
        order = sorted((times.prefetch, times.first_use, -number) for number, times in swaps.items())
        self._fetches = deque((prefetch, -number) for prefetch, _, number in order)
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
            self._operator = operator
            return self._pack(tensor)

    def unpack(self, packed: Kept | View | Tensor) -> Tensor:
        assert self.observer is not None
        operator = self.observer.at_hook("load")
        if operator >= self._due or self._recorder is not None:
            self._advance(operator)
        if not isinstance(packed, View):
            return self._load(packed)
        with self._lock, self._uncounted():
            tensor = self._load(packed)
            if self._plan is None or packed.saved.number is None:
                self._fetch_ahead(packed.saved)
            return tensor

    def _first_used(self, saved: Saved) -> None:
        if self._recorder is not None and saved.generation == self.generation:
            self._recorder.first_used(saved)

    def _born(self, saved: Saved, tensor: Tensor) -> None:
        assert self.observer is not None
        reference = weakref.ref(saved)
        saved.feature = Feature(tuple(tensor.shape), tensor.dtype, saved.nbytes, self.observer.last())
        self._seen.append(saved.reference)
        self.features.append(saved.feature)
        self._this_step.append(reference)
        saved.number = self._number(saved, saved.feature, self._operator)
        if saved.number is not None:
            self._numbered[saved.number] = reference
        if self._recorder is not None:
            self._recorder.born(saved, len(self.features) - 1, self._operator)
        self._decide(saved)

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

    # The way back

    def _fetch_ahead(self, asked: Saved) -> None:
        """Without a plan: the backward will most likely ask for what was saved just before."""
        fetched = 0
        for serial in range(asked.serial - 1, max(0, asked.serial - 64), -1):
            reference = self._all.get(serial)
            saved = reference() if reference is not None else None
            if saved is None or saved.state is State.HERE or saved.used:
                continue
            if saved.state is State.AWAY:
                room = self.streams.memory_in_use() + saved.nbytes <= self.gpu_budget
                if not room or not self._fetch(saved):
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
                    self._fetch(saved)
            self._set_due()
            if self._recorder is not None:
                self._recorder.moment(operator, self.away_bytes)

    def _set_due(self) -> None:
        first = min(self._releases.next_operator, self._fetches[0][0] if self._fetches else NEVER)
        self._due = first + self._drift

    # Memory

    def _reliefs(self, nbytes: int) -> Sequence[Callable[[], Any]]:
        """In this order: copies under way, the allocator's cache, other saved tensors."""
        return self.drain, self.streams.free_cached, lambda: self.evict(nbytes)

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

    # For tests and reports

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
