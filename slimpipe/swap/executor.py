"""Carries out a plan that goes by operators: what `SwapManager` moves with.

For want of room tensors are moved that no plan moves, the oldest first. At each hook everything that is
due by the operator count is done (`_advance`): tensors whose operator has come leave the device, copies back are
started.
"""

from __future__ import annotations

import heapq
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from slimpipe.swap.arena import PinnedArenas
from slimpipe.swap.excluded import Excluded
from slimpipe.swap.execution import ExecutionPlan, Times
from slimpipe.swap.features import Feature, Matcher
from slimpipe.swap.mover import Kept, Mover
from slimpipe.swap.observer import Observer
from slimpipe.swap.release import Holder, ReleaseQueue
from slimpipe.swap.room import Room
from slimpipe.swap.saved import Saved, SavedReference, State, View
from slimpipe.swap.streams import Streams

if TYPE_CHECKING:
    from slimpipe.swap.recorder import Recorder

NEVER = float("inf")
LOOKAHEAD = 2
"""Tensors fetched ahead of the one asked for where no plan says when."""
SMALLER = 64
"""A profiled step notes tensors down to this part of `min_bytes`: an expert's may be large in the next one."""


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
        self.room = Room()
        self.changed_plan = False
        """Whether this step went over to another plan."""
        self._this_step: list[SavedReference] = []
        """As `features`."""
        self._plan: ExecutionPlan | None = None
        self._recorder: Recorder | None = None
        self._matcher = Matcher(())
        self._others: Sequence[ExecutionPlan] = ()
        self._drift = self._left_out = 0
        """`_left_out`: the most operators left out at once in this step, as may happen again before the next use."""
        self._due: float = NEVER
        self._limit = gpu_budget
        """Bytes that may be in use in this step."""
        self._releases = ReleaseQueue()
        self._fetches: list[tuple[int, int, int]] = []
        """A heap of (operator of the plan, that of the first use, -serial): in the order in which the policy counted on
        the link, of those started at once the first needed first."""
        self._oldest = 0
        """Place in `_this_step`: those before it were moved, or had to stay."""
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
        self.least = self.min_bytes if recorder is None else max(1, self.min_bytes // SMALLER)
        self.features, self._this_step = [], []
        self.most_in_use = 0
        self.changed_plan = False
        self._oldest = 0
        self._follow(plan)

    def end(self) -> None:
        """Nothing of the step is left pending: what was to leave has left, and no plan applies any more."""
        with self._lock:
            for saved in self._releases.clear():
                self._release(saved)
            self._plan, self._recorder, self._others = None, None, ()
            self._fetches.clear()
            self._due = NEVER
            self.settle()

    def _learn_what_lasts(self) -> None:
        """Storages of the last step that others hold still: tables, data, no activations."""
        for reference in self._seen:
            if self._referred_to(reference, self._holders[reference.cdata]):
                self.excluded.add_reference(reference)
        self._seen.clear()
        self.excluded.forget_dead()

    def _follow(self, plan: ExecutionPlan | None) -> None:
        self._plan, self._drift, self._left_out = plan, 0, 0
        # A plan that cannot keep the budget comes as near to it as can be.
        self._limit = max(self.gpu_budget, plan.peak if plan is not None else 0)
        self._matcher = Matcher(plan.expected, packed_at=plan.packed_at) if plan is not None else Matcher(())
        self._fetches.clear()
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
            with observer.paused():
                return self._keep(tensor)
        with self._lock, observer.paused():
            self.settle()
            self._release_done()
            self._operator = operator
            return self._pack(tensor)

    def unpack(self, packed: Kept | View | Tensor) -> Tensor:
        assert self.observer is not None
        operator = self._operator = self.observer.at_hook("load")
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
        plan = self._plan
        if plan is not None and saved.number in plan.used_at and saved.generation == self.generation:
            # The backward of what was inserted or left out is another number of operators than its forward.
            self._shift(self._operator - plan.used_at[saved.number])
        if self._recorder is not None and saved.generation == self.generation:
            self._recorder.first_used(saved)

    def _born(self, saved: Saved, tensor: Tensor) -> None:
        assert self.observer is not None
        reference = weakref.ref(saved)
        saved.feature = Feature(tuple(tensor.shape), tensor.dtype, saved.nbytes, self.observer.last(), saved.source)
        self._seen.append(saved.reference)
        if self._recorder is not None:
            self._recorder.born(saved, self._operator)
        if saved.nbytes < self.min_bytes:
            return
        self.features.append(saved.feature)
        self._this_step.append(reference)
        saved.number = self._number(saved, saved.feature, self._operator)
        self._decide(saved)

    def _number(self, saved: Saved, feature: Feature, operator: int) -> int | None:
        """The tensor's place in the sequence that the plan is for."""
        number = self._matcher.match(feature, operator)
        missed = len(self.features) - self._matcher.exact
        # At the first, second, fourth... that does not fit: in a mixture of experts most never do.
        if missed & (missed - 1) == 0 and missed and self._change_plan():
            return saved.number
        plan = self._plan
        if plan is None:
            return None
        if number is not None:
            self._shift(self._matcher.drift)
            return number
        self.counts.problem("mismatches", saved.origin)
        return None

    def _shift(self, drift: int) -> None:
        """Operators inserted or left out up to now shift what is still to come by as much."""
        self._left_out = max(self._left_out, self._drift - drift)
        self._drift = drift
        self._set_due()

    def _change_plan(self) -> bool:
        """Goes over to the cached plan that follows the step so far to the letter, if there is one."""
        for plan in self._others:
            numbers = plan.large[: len(self.features)]
            if plan is not self._plan and [plan.expected[number] for number in numbers] == self.features:
                break
        else:
            return False
        self.changed_plan = True
        self._follow(plan)
        operators = [*(plan.packed_at[number] for number in numbers[:-1]), self._operator]
        for feature, operator, reference in zip(self.features, operators, self._this_step, strict=True):
            number, saved = self._matcher.match(feature, operator), reference()
            if number is None or saved is None:
                continue
            saved.number = number
            if saved.state is not State.HERE:
                self._fetch_at(saved, plan.swaps.get(number))
            # The last one is new: where it goes is decided by who asked.
            if number in plan.swaps and saved.state is State.HERE and not saved.used and saved.serial != self._serial:
                self._decide(saved)
        return True

    # Where a tensor goes

    def _decide(self, saved: Saved) -> None:
        plan = self._plan
        times = plan.swaps.get(saved.number) if plan is not None and saved.number is not None else None
        self.most_in_use = max(self.most_in_use, self.streams.memory_in_use())
        if times is not None:
            saved.planned = True
            if self._start_copy(saved):
                self.counts.planned_out += saved.nbytes
                self._releases.add(saved, times.release)
                self._fetch_at(saved, times)
                self._set_due()
            return
        known = plan is not None and saved.number is not None
        # A step that follows its plan to the letter needs no more than was planned.
        differs = plan is not None and self._matcher.exact < len(self.features)
        ahead = self.room.ahead(known) if differs else 0
        limit = self.gpu_budget - max(ahead, 0 if known else self.headroom)
        if self._make_room(limit):
            return
        self.counts.problem("fallbacks", saved.origin)
        for other in self._older(self.streams.memory_in_use() - limit, saved):
            if self._start_copy(other):
                self._releases.add(other, NEVER)
                self._fetch_at(other, None)

    def _older(self, nbytes: int, newest: Saved) -> Iterator[Saved]:
        """Tensors of this step that are to leave for `nbytes` bytes of room: kept ones that only autograd holds, the
        oldest first, since the backward needs them last; where they do not suffice, `newest`."""
        found = 0
        while found < nbytes and self._oldest < len(self._this_step):
            saved = self._this_step[self._oldest]()
            if saved is newest:
                break
            self._oldest += 1
            kept = saved is not None and saved.state is State.HERE and not saved.used
            if saved is not None and kept and not self._referred_to(saved.reference, own=1):
                found += saved.nbytes
                yield saved
        if found < nbytes:
            yield newest

    def _make_room(self, limit: int) -> bool:
        """Of those that are leaving, the ones that were started earlier go at once: their copies are further on.
        Whether no more than `limit` bytes are in use then."""
        while (over := self.streams.memory_in_use() > limit) and len(self._releases):
            self._release_next()
        return not over

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

    def _fetch_at(self, saved: Saved, times: Times | None) -> None:
        """When the copy back is to start. Without times of its own: as the plan has it for a tensor that it does not
        move; where it does not know the tensor, for the next one that it does: that is needed before."""
        plan = self._plan
        if plan is None:
            return
        if times is not None:
            heapq.heappush(self._fetches, (times.prefetch, times.first_use, -saved.serial))
        else:
            first = saved.number if saved.number is not None else self._matcher.place
            places = range(first, min(first + self._matcher.window, len(plan.expected)))
            known = next((number for number in places if number in plan.fetch_at), None)
            if known is not None:
                heapq.heappush(self._fetches, (plan.fetch_at[known], plan.used_at[known], -saved.serial))

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
            while self._fetches and self._fetches[0][0] <= now + self._left_out:
                reference = self._all.get(-self._fetches[0][2])
                saved = reference() if reference is not None else None
                if saved is not None and saved.state is State.AWAY and not saved.used:
                    # Sizes are not the planned ones: it waits until the backward has made room, or asks for it.
                    if self.streams.memory_in_use() + saved.nbytes > self._limit:
                        break
                    self._fetch(saved)
                heapq.heappop(self._fetches)
            self._set_due()
            if self._recorder is not None:
                self._recorder.moment(operator, self.away_bytes)

    def _set_due(self) -> None:
        first = min(self._releases.next_operator, self._fetches[0][0] - self._left_out if self._fetches else NEVER)
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
