"""How long a rank computed, and how long it waited: the measured bubble of a step.

On the CPU by the host's clock. On a GPU by device events around every action's compute: the host runs ahead there and
nothing in a step waits for it; the events are read after the step.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class StepTime:
    """Seconds: the whole step, its part spent inside `busy` sections, and inside `waiting` sections by name."""

    total: float
    busy: float
    waits: dict[str, float]

    @property
    def idle_share(self) -> float:
        return 1.0 - self.busy / self.total if self.total > 0 else 0.0


class Clock(Protocol):
    """Measures one step at a time: `start`, any number of `busy` sections, `stop`."""

    def start(self) -> None: ...

    def busy(self, what: str) -> AbstractContextManager[None]:
        """Counts what runs inside as computing. `what` names it (an action's token)."""
        ...

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Counts what runs inside as waiting, under `what` (an operation's token), also inside a `busy` section."""
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

    def start(self) -> None:
        self._start, self._busy = time.perf_counter(), 0.0
        self._waits.clear()

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
    def waiting(self, what: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        waited = time.perf_counter() - begin
        self._waits[what] += waited
        if self._inside:
            self._busy -= waited

    def stop(self) -> StepTime:
        return StepTime(time.perf_counter() - self._start, self._busy, dict(self._waits))

    def unfinished(self) -> str | None:
        return None


class DeviceClock:
    """For a GPU: a pair of events on the compute stream around each section. Events are pooled and reused."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: list[torch.cuda.Event] = []
        self._begin = self._event()
        self._sections: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._waits: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._waits_inside: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._inside = False

    def start(self) -> None:
        for _, begin, end in self._sections + self._waits + self._waits_inside:
            self._pool += (begin, end)
        self._sections, self._waits, self._waits_inside = [], [], []
        self._begin.record()

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        self._inside = True
        try:
            with self._between_events(what, self._sections):
                yield
        finally:
            self._inside = False

    def waiting(self, what: str) -> AbstractContextManager[None]:
        return self._between_events(what, self._waits_inside if self._inside else self._waits)

    @contextmanager
    def _between_events(self, what: str, into: list[tuple[str, torch.cuda.Event, torch.cuda.Event]]) -> Iterator[None]:
        begin, end = self._event(), self._event()
        begin.record()
        yield
        end.record()
        into.append((what, begin, end))

    def stop(self) -> StepTime:
        end = self._event()
        end.record()
        end.synchronize()
        busy = sum(begin.elapsed_time(finish) for _, begin, finish in self._sections)
        total = self._begin.elapsed_time(end)
        busy -= sum(begin.elapsed_time(finish) for _, begin, finish in self._waits_inside)
        waits: defaultdict[str, float] = defaultdict(float)
        for what, begin, finish in self._waits + self._waits_inside:
            waits[what] += begin.elapsed_time(finish) / 1e3
        self._pool.append(end)
        return StepTime(total / 1e3, busy / 1e3, dict(waits))

    def unfinished(self) -> str | None:
        for what, _, end in self._sections + self._waits + self._waits_inside:
            if not end.query():
                return what
        return None

    def _event(self) -> torch.cuda.Event:
        return self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)


def make_clock(device: torch.device) -> Clock:
    return DeviceClock(device) if device.type == "cuda" else HostClock()
