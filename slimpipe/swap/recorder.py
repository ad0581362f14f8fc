"""The detailed profile of one step: what was saved, when it was used, the memory and the time at every hook.

A *moment* is a call of a hook: the points at which the manager can act. Memory of moment k is the most in use between
it and the next one, with what was away at the time added: the curve of a step that moves nothing.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from dataclasses import dataclass

from slimpipe.swap.features import Feature
from slimpipe.swap.references import references
from slimpipe.swap.saved import Saved, SavedReference
from slimpipe.swap.streams import Mark, Streams
from slimpipe.swap.timeline import Candidate, Timeline


@dataclass(frozen=True)
class Profile:
    """`operators[k]`: the operator count at moment k. `members[name]`: places in `features` of the tensors that a
    candidate is made of: all that were saved of one storage, which is freed only when all of them have left.
    `first_use[i]`: the moment at which the backward asked for `features[i]`. Features of tensors that are too small to
    be moved are among them."""

    features: tuple[Feature, ...]
    packed_at: tuple[int, ...]
    operators: tuple[int, ...]
    timeline: Timeline
    candidates: tuple[Candidate, ...]
    members: dict[int, tuple[int, ...]]
    first_use: dict[int, int]


class Recorder:
    """Tensors of fewer than `min_bytes` bytes are noted, but are no candidates."""

    def __init__(self, streams: Streams, min_bytes: int) -> None:
        self._streams, self._min_bytes = streams, min_bytes
        self._operators: list[int] = []
        self._marks: list[Mark] = []
        self._memory: list[int] = []
        self._features: list[Feature] = []
        self._packed_at: list[int] = []
        self._born: list[int] = []
        self._last_use: dict[int, int] = {}
        self._first_use: dict[int, int] = {}
        self._names: dict[int, int] = {}
        """By serial."""
        self._open: dict[int, tuple[SavedReference, int]] = {}
        """Those that others may hold still: (reference, storage) by name."""
        self._of_storage: defaultdict[int, list[SavedReference]] = defaultdict(list)
        self._groups: list[list[int]] = []
        self._group_of_storage: dict[int, list[int]] = {}
        self._away = 0
        streams.peak_memory(restart=True)

    def moment(self, operator: int, away: int) -> None:
        peak = self._streams.peak_memory(restart=True)
        if self._memory:
            self._memory[-1] = peak + self._away
        self._away = away
        self._memory.append(self._streams.memory_in_use() + away)
        self._operators.append(operator)
        self._marks.append(self._streams.mark())
        self._look_who_let_go()

    def born(self, saved: Saved, operator: int) -> None:
        assert saved.feature is not None
        name = len(self._features)
        reference = weakref.ref(saved)
        self._features.append(saved.feature)
        self._packed_at.append(operator)
        self._born.append(self._now)
        self._names[saved.serial] = name
        self._open[name] = (reference, saved.reference.cdata)
        # The address means the same storage only as long as someone holds a reference to it.
        others = self._of_storage[saved.reference.cdata]
        if not any(other() is not None for other in others):
            self._groups.append([])
            self._group_of_storage[saved.reference.cdata] = self._groups[-1]
        self._group_of_storage[saved.reference.cdata].append(name)
        others.append(reference)

    def first_used(self, saved: Saved) -> None:
        name = self._names.get(saved.serial)
        if name is not None:
            self._first_use.setdefault(name, self._now)

    def finish(self) -> Profile:
        """Waits for the device."""
        if self._memory:
            self._memory[-1] = max(self._memory[-1], self._streams.peak_memory() + self._away)
        seconds = tuple(self._streams.seconds(self._marks[0], mark) for mark in self._marks)
        candidates = {group[0]: found for group in self._groups if (found := self._candidate(group)) is not None}
        timeline = Timeline(seconds, tuple(self._memory))
        return Profile(
            tuple(self._features),
            tuple(self._packed_at),
            tuple(self._operators),
            timeline,
            tuple(candidates.values()),
            {group[0]: tuple(group) for group in self._groups if group[0] in candidates},
            dict(self._first_use),
        )

    def _candidate(self, group: list[int]) -> Candidate | None:
        """None where moving it would free nothing: its graph was dropped, or others hold it up to its use."""
        uses = [self._first_use[name] for name in group if name in self._first_use]
        if not uses or any(name not in self._last_use for name in group):
            return None
        if any(self._features[name].nbytes < self._min_bytes for name in group):
            return None
        last, first = max(self._last_use[name] for name in group), min(uses)
        if last >= first:
            return None
        nbytes = sum(self._features[name].nbytes for name in group)
        return Candidate(group[0], nbytes, max(self._born[name] for name in group), last, first)

    @property
    def _now(self) -> int:
        return len(self._operators) - 1

    def _look_who_let_go(self) -> None:
        for name, (reference, storage) in list(self._open.items()):
            saved = reference()
            if saved is None or name in self._first_use:
                del self._open[name]
            elif not self._held_by_others(storage):
                self._last_use[name] = max(self._now - 1, self._born[name])
                del self._open[name]

    def _held_by_others(self, storage: int) -> bool:
        """Callers hold a `Saved` of the storage, whose weak reference keeps the address good."""
        alive = [saved for reference in self._of_storage[storage] if (saved := reference()) is not None]
        own = sum(saved.original is not None or saved.held is not None for saved in alive)
        return references(storage) > own + self._streams.aliases(storage)
