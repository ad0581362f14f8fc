"""How long a rank computed, and how long it waited: the measured bubble of a step.

On the CPU by the host's clock. On a GPU by device events around every action's compute: the host runs ahead there and
nothing in a step waits for it; the events are read after the step.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class StepTime:
    """Seconds: the whole step, its part spent inside `busy` sections, and inside `waiting` sections by name.

    `waits_at`: the same by the action that a section was said to be in, and `under_way`: how long transfers of each
    name were under way, from the first post to the last end, overlaps counted once; empty where no device tells.
    """

    total: float
    busy: float
    waits: dict[str, float]
    waits_at: dict[str, float]
    under_way: dict[str, float]

    @property
    def idle_share(self) -> float:
        return 1.0 - self.busy / self.total if self.total > 0 else 0.0


class Clock(Protocol):
    """Measures one step at a time: `start`, any number of `busy` sections, `stop`."""

    def start(self) -> None: ...

    def busy(self, what: str) -> AbstractContextManager[None]:
        """Counts what runs inside as computing. `what` names it (an action's token)."""
        ...

    def waiting(self, what: str, at: str | None = None) -> AbstractContextManager[None]:
        """Counts what runs inside as waiting, under `what` (an operation's token), also inside a `busy` section.

        `at`: the action to charge as well.
        """
        ...

    def mark(self) -> torch.cuda.Event | None:
        """Here and now on the device, for `under_way`; None where the host keeps the time."""
        ...

    def under_way(self, what: str, begin: torch.cuda.Event | None, follow: Callable[[], bool]) -> None:
        """Transfers have been posted since `begin`. `follow` makes the current stream wait for their end, or says that
        it cannot."""
        ...

    def stop(self) -> StepTime:
        """Ends the step. On a GPU this waits for the device."""
        ...

    def unfinished(self) -> str | None:
        """The first section the device has not finished, None where it has finished all (or there is no device)."""
        ...


class HostClock:
    """For the CPU, where a section is over when its call returns."""

    def __init__(self) -> None:
        self._start = self._busy = 0.0
        self._inside = False
        self._waits: defaultdict[str, float] = defaultdict(float)
        self._waits_at: defaultdict[str, float] = defaultdict(float)

    def start(self) -> None:
        self._start, self._busy = time.perf_counter(), 0.0
        self._waits.clear()
        self._waits_at.clear()

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        begin = time.perf_counter()
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
        self._busy += time.perf_counter() - begin

    @contextmanager
    def waiting(self, what: str, at: str | None = None) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        waited = time.perf_counter() - begin
        self._waits[what] += waited
        if at is not None:
            self._waits_at[at] += waited
        if self._inside:
            self._busy -= waited

    def mark(self) -> torch.cuda.Event | None:
        return None

    def under_way(self, what: str, begin: torch.cuda.Event | None, follow: Callable[[], bool]) -> None:
        """The host does not see when a transfer ends."""

    def stop(self) -> StepTime:
        return StepTime(
            time.perf_counter() - self._start, self._busy, dict(self._waits), dict(self._waits_at), under_way={}
        )

    def unfinished(self) -> str | None:
        return None


@dataclass(frozen=True)
class _Span:
    """Between two events of a device. `at`: the action to charge as well."""

    what: str
    begin: torch.cuda.Event
    end: torch.cuda.Event
    at: str | None = None

    @property
    def seconds(self) -> float:
        return float(self.begin.elapsed_time(self.end)) / 1e3


class DeviceClock:
    """For a GPU: a pair of events on the compute stream around each section. Events are pooled and reused.

    Transfers are followed on a stream of their own, which nothing waits for before the step's end.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: list[torch.cuda.Event] = []
        self._begin = self._event()
        self._sections: list[_Span] = []
        self._waits: list[_Span] = []
        self._waits_inside: list[_Span] = []
        self._transfers: list[_Span] = []
        self._inside = False
        self._side = torch.cuda.Stream(device)

    def start(self) -> None:
        for span in self._all():
            self._pool += (span.begin, span.end)
        self._sections, self._waits, self._waits_inside, self._transfers = [], [], [], []
        self._begin.record()

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        self._inside = True
        try:
            with self._between_events(what, None, self._sections):
                yield
        finally:
            self._inside = False

    def waiting(self, what: str, at: str | None = None) -> AbstractContextManager[None]:
        return self._between_events(what, at, self._waits_inside if self._inside else self._waits)

    @contextmanager
    def _between_events(self, what: str, at: str | None, into: list[_Span]) -> Iterator[None]:
        begin, end = self.mark(), self._event()
        yield
        end.record()
        into.append(_Span(what, begin, end, at))

    def mark(self) -> torch.cuda.Event:
        event = self._event()
        event.record()
        return event

    def under_way(self, what: str, begin: torch.cuda.Event | None, follow: Callable[[], bool]) -> None:
        assert begin is not None
        with torch.cuda.stream(self._side):
            if follow():
                end = self._event()
                end.record(self._side)
                self._transfers.append(_Span(what, begin, end))

    def stop(self) -> StepTime:
        end = self.mark()
        end.synchronize()
        self._side.synchronize()
        busy = sum(span.seconds for span in self._sections) - sum(span.seconds for span in self._waits_inside)
        waits: defaultdict[str, float] = defaultdict(float)
        waits_at: defaultdict[str, float] = defaultdict(float)
        for span in self._waits + self._waits_inside:
            waits[span.what] += span.seconds
            if span.at is not None:
                waits_at[span.at] += span.seconds
        transfers: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        for span in self._transfers:
            since = float(self._begin.elapsed_time(span.begin)) / 1e3
            transfers[span.what].append((since, since + span.seconds))
        self._pool.append(end)
        total = float(self._begin.elapsed_time(end)) / 1e3
        under_way = {what: covered(spans) for what, spans in transfers.items()}
        return StepTime(total, busy, dict(waits), dict(waits_at), under_way)

    def unfinished(self) -> str | None:
        return next((span.what for span in self._all() if not span.end.query()), None)

    def _all(self) -> list[_Span]:
        return self._sections + self._waits + self._waits_inside + self._transfers

    def _event(self) -> torch.cuda.Event:
        return self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of (begin, end) spans."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def make_clock(device: torch.device) -> Clock:
    return DeviceClock(device) if device.type == "cuda" else HostClock()
