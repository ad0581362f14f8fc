"""A device with streams that are threads, and memory that ranks share, for the lanes of `slimpipe.runtime.symmetric`.

Every operation of a stream is late by chance, and copies are made in two halves with a pause between: what is not
ordered by a counter or an event sooner or later shows in the values.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from slimpipe.runtime.symmetric.lane import Event

LIMIT = 60.0
"""Seconds after which a stream that stands still is stuck."""
Delay = Callable[[], None]


class Stuck(RuntimeError):
    """A wait that nothing ends."""


class FakeEvent:
    def __init__(self) -> None:
        self.happened = threading.Event()

    def done(self) -> bool:
        return self.happened.is_set()


class Node:
    """What the ranks of a node have in common. `pause` is called before each operation of a stream, and in copies."""

    def __init__(self, ranks: Sequence[int], seed: int = 0, slowest: float = 0.002) -> None:
        self.ranks = tuple(ranks)
        self.stopped = threading.Event()
        self.failure: BaseException | None = None
        self._random = random.Random(seed)
        self._slowest = slowest
        self._lock = threading.Lock()
        self._arenas: dict[tuple[int, int], dict[int, Tensor]] = {}

    def pause(self) -> None:
        with self._lock:
            some = self._random.random()
        if some < 0.5:  # of the delays half are none, so that others overtake
            time.sleep(some * 2 * self._slowest)

    def device(self, hosted: bool = False, pause: Delay | None = None) -> FakeDevice:
        return FakeDevice(self, hosted, pause or self.pause)

    def make_arena(self, rank: int) -> Callable[[int], FakeArena]:
        """The n-th arena that each rank makes is the same memory."""
        made = iter(range(1000))

        def make(size: int) -> FakeArena:
            with self._lock:
                memory = self._arenas.setdefault(
                    (next(made), size), {rank: torch.zeros(size, dtype=torch.uint8) for rank in self.ranks}
                )
            return FakeArena(memory)

        return make

    def wait(self, until: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT
        while not until():
            if self.stopped.is_set() or time.monotonic() > end:
                raise Stuck
            time.sleep(1e-4)


class FakeArena:
    def __init__(self, memory: dict[int, Tensor]) -> None:
        self.memory = memory

    def bytes(self, rank: int, start: int, size: int) -> Tensor:
        assert start + size <= self.memory[rank].numel()
        return self.memory[rank][start : start + size]


class HostStream:
    """Does everything at once, on the thread that asks: the host is the compute stream, as on a CPU."""

    def __init__(self, node: Node, pause: Delay) -> None:
        self._node, self._pause = node, pause

    @torch.no_grad()
    def copy(self, target: Tensor, source: Tensor) -> None:
        half = target.shape[0] // 2
        target[:half].copy_(source[:half])
        self._pause()
        target[half:].copy_(source[half:])

    @torch.no_grad()
    def add(self, target: Tensor, source: Tensor) -> None:
        half = target.shape[0] // 2
        target[:half].add_(source[:half])
        self._pause()
        target[half:].add_(source[half:])

    def wait_until(self, counter: Tensor, value: int) -> None:
        self._node.wait(lambda: wrapped(int(counter) - value) >= 0)

    def set(self, counter: Tensor, value: int) -> None:
        self._pause()
        counter.fill_(wrapped(value))

    def record(self) -> FakeEvent:
        event = FakeEvent()
        event.happened.set()
        return event

    def follow(self, event: Event) -> None:
        self._node.wait(event.done)


class ThreadStream:
    """Does the same in a thread of its own, in order."""

    def __init__(self, node: Node, pause: Delay) -> None:
        self._node, self._pause, self._does = node, pause, HostStream(node, pause)
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            if self._node.stopped.is_set():
                return
            try:
                self._pause()
                work()
            except BaseException as error:
                self._node.failure = self._node.failure or error
                self._node.stopped.set()

    def call(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.call(lambda: self._does.copy(target, source))

    def add(self, target: Tensor, source: Tensor) -> None:
        self.call(lambda: self._does.add(target, source))

    def wait_until(self, counter: Tensor, value: int) -> None:
        self.call(lambda: self._does.wait_until(counter, value))

    def set(self, counter: Tensor, value: int) -> None:
        self.call(lambda: self._does.set(counter, value))

    def record(self) -> FakeEvent:
        event = FakeEvent()
        self.call(event.happened.set)
        return event

    def follow(self, event: Event) -> None:
        self.call(lambda: self._does.follow(event))

    def end(self) -> None:
        self._work.put(None)


class FakeDevice:
    """One rank's. `hosted`: its compute stream is the host."""

    def __init__(self, node: Node, hosted: bool, pause: Delay) -> None:
        self.node, self._pause = node, pause
        self.streams: list[ThreadStream] = []
        self.compute = HostStream(node, pause) if hosted else self.side()

    def current(self) -> HostStream | ThreadStream:
        return self.compute

    def side(self) -> ThreadStream:
        self.streams.append(ThreadStream(self.node, self._pause))
        return self.streams[-1]

    def synchronize(self) -> None:
        for event in [stream.record() for stream in self.streams]:
            self.node.wait(event.done)


@contextmanager
def ended(devices: Sequence[FakeDevice]) -> Iterator[None]:
    """Waits for all streams at the end, and raises what went wrong in one."""
    node = devices[0].node
    try:
        yield
        for device in devices:
            device.synchronize()
    except Stuck:
        pass
    finally:
        node.stopped.set()
        for device in devices:
            for stream in device.streams:
                stream.end()
    if node.failure is not None:
        raise node.failure


def wrapped(value: int) -> int:
    """As a signed number of 32 bits, the form that counters have."""
    return (value + 2**31) % 2**32 - 2**31
