"""A device that is not there: tensors of the CPU, and copies that come as late or in as odd an order as they may.

The CPU's own memory plays the device. Compute happens at once, when the host calls it; a copy happens

- `late`: not before something waits for it;
- `random`: at a random later call, the directions interleaved at random, each in its own order;
- `early`: when it is started.

An event that was not waited for has not happened. Memory that was given up before a copy had read it is poisoned (all
bytes 0xFF: NaN as a float), as are fresh blocks and reads that come before a copy's end, so a missing wait gives wrong
numbers. A copy from or into memory that was given up is noted in `faults`.

A clock without wall time: compute advances by `seconds_per_operator` an operator (`at_operator`), copies take their
bytes over `rate`, a wait moves the clock to the end of what it waits for and adds the difference to `stalled`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from slimpipe.swap.geometry import bytes_of
from slimpipe.swap.references import count_when_alone, references

Order = Literal["late", "random", "early"]
POISON = 0xFF


@dataclass(eq=False)
class Copy:
    """A copy under way, and the event at its end. Its aliases keep the memory from malloc, not from being poisoned."""

    source: Tensor
    target: Tensor
    after: list[Copy]
    device_storage: int
    inward: bool
    end: float
    happened: bool = False


@dataclass
class SimulatedStreams:
    order: Order = "late"
    seed: int = 0
    rate: float = 50e9
    seconds_per_operator: float = 1e-5
    pinnable: int | None = None
    """Bytes of pinned host memory to be had; None: any number."""
    size: int = 1 << 40
    """Bytes of memory of the device: what `memory_size` says; it is not enforced."""
    capacity: int | None = None
    """Bytes in use above which `empty` raises torch.OutOfMemoryError; None: it never does."""
    device: torch.device = field(default=torch.device("cpu"), init=False)
    clock: float = field(default=0.0, init=False)
    stalled: float = field(default=0.0, init=False)
    faults: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._queues: dict[bool, list[Copy]] = {False: [], True: []}
        self._link_free = {False: 0.0, True: 0.0}
        self._aliases: Counter[int] = Counter()
        self._watched: dict[int, tuple[StorageWeakRef, int]] = {}
        self._operator = self._peak = self._pinned = 0

    def copy_out(self, source: Tensor, host: Tensor, after: Sequence[Copy]) -> Copy:
        return self._start(source, host, after, source, inward=False)

    def copy_in(self, host: Tensor, target: Tensor, after: Sequence[Copy]) -> Copy:
        return self._start(host, target, after, target, inward=True)

    def copies(self, pairs: Sequence[tuple[Tensor, Tensor]], inward: bool, after: Sequence[Copy]) -> Copy:
        copy = self.copy_in if inward else self.copy_out
        events = [copy(source, target, after) for source, target in pairs]
        return events[-1]

    def _start(self, source: Tensor, target: Tensor, after: Sequence[Copy], on_device: Tensor, inward: bool) -> Copy:
        begin = max([self.clock, self._link_free[inward], *(event.end for event in after)])
        end = self._link_free[inward] = begin + source.numel() / self.rate
        # Aliases of its own: whether the caller keeps its tensors alive must show in the number of references.
        storage = on_device.untyped_storage()
        self._aliases[storage._cdata] += 1
        copy = Copy(_alias(source), _alias(target), list(after), storage._cdata, inward, end)
        self._queues[inward].append(copy)
        del storage
        if self.order == "early":
            self._happen(copy)
        self._let_some_happen()
        return copy

    def wait(self, event: Copy) -> None:
        self._let_some_happen()
        self._happen(event)
        if event.end > self.clock:
            self.stalled += event.end - self.clock
            self.clock = event.end

    def wait_everywhere(self, event: Copy) -> None:
        self.wait(event)

    def done(self, event: Copy) -> bool:
        self._let_some_happen()
        return event.happened

    def synchronize(self, event: Copy) -> None:
        self.wait(event)

    def empty(self, nbytes: int) -> Tensor:
        self._let_some_happen()
        if self.capacity is not None and self.memory_in_use() + nbytes > self.capacity:
            raise torch.OutOfMemoryError(f"simulated device: {nbytes} bytes asked for, capacity {self.capacity}")
        block = torch.full((nbytes,), POISON, dtype=torch.uint8, device="cpu")
        self.watch(block.untyped_storage())
        return block

    def current(self) -> Any:
        return None

    def use_here(self, tensor: Tensor, allocated_on: Any) -> None:
        pass

    def host_memory(self, nbytes: int) -> Tensor:
        if self.pinnable is not None and self._pinned + nbytes > self.pinnable:
            raise RuntimeError(f"simulated device: no {nbytes} bytes of pinned memory")
        self._pinned += nbytes
        return torch.full((nbytes,), POISON, dtype=torch.uint8, device="cpu")

    def watch(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._watched:
            self._watched[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._peak = max(self._peak, self.memory_in_use())

    def aliases(self, storage: int) -> int:
        return self._aliases.get(storage, 0)

    def memory_in_use(self) -> int:
        """Bytes of the watched storages that someone beside the copies under way refers to."""
        total, gone, alone = 0, [], count_when_alone()
        for cdata, (_, nbytes) in self._watched.items():
            # The weak reference keeps the address good.
            uses = torch._C._storage_Use_Count(cdata)
            if uses == 0:
                gone.append(cdata)
            elif uses - alone + 1 > self._aliases.get(cdata, 0):
                total += nbytes
        for cdata in gone:
            del self._watched[cdata]
        return total

    def peak_memory(self, restart: bool = False) -> int:
        peak = self._peak
        if restart:
            self._peak = self.memory_in_use()
        return peak

    def memory_size(self) -> int:
        return self.size

    def free_cached(self) -> None:
        pass

    def at_operator(self, index: int) -> None:
        # The count begins anew with each step.
        operators = index - self._operator if index >= self._operator else index
        self.clock += self.seconds_per_operator * operators
        self._operator = index

    def mark(self) -> float:
        return self.clock

    def passed(self, mark: float) -> bool:
        return True

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def rates(self) -> tuple[float, float]:
        return self.rate, self.rate

    def under_way(self) -> int:
        """Copies that have not happened."""
        return len(self._queues[False]) + len(self._queues[True])

    def _referred_to(self, cdata: int) -> bool:
        return references(cdata) > self._aliases.get(cdata, 0)

    def _let_some_happen(self) -> None:
        self._poison_given_up()
        if self.order != "random":
            return
        for _ in range(self._random.randrange(3)):
            ready = [queue[0] for queue in self._queues.values() if queue and all(c.happened for c in queue[0].after)]
            if ready:
                self._happen(self._random.choice(ready))

    def _poison_given_up(self) -> None:
        for copy in self._queues[False]:
            if not self._referred_to(copy.device_storage) and _intact(copy.source):
                copy.source.fill_(POISON)

    def _happen(self, copy: Copy) -> None:
        """The copy, after those before it in its direction and those it was told to follow, and no others."""
        if copy.happened:
            return
        queue = self._queues[copy.inward]
        while not copy.happened:
            first = queue[0]
            for earlier in first.after:
                self._happen(earlier)
            if first.happened:  # by the line above
                continue
            self._poison_given_up()
            if first.inward and not self._referred_to(first.device_storage):
                self.faults.append(f"a copy of {first.target.numel()} bytes into memory that was given up")
            if not first.inward and not self._referred_to(first.device_storage):
                self.faults.append(f"a copy of {first.source.numel()} bytes from memory that was given up")
            if _intact(first.source):
                first.target.copy_(first.source)
            else:  # its storage was shrunk
                first.target.fill_(POISON)
            first.happened = True
            queue.remove(first)
            self._aliases[first.device_storage] -= 1
            if not self._aliases[first.device_storage]:
                del self._aliases[first.device_storage]
            first.after = []
            first.source = first.target = torch.empty(0, dtype=torch.uint8, device="cpu")


def _alias(flat: Tensor) -> Tensor:
    offset = int(flat.storage_offset())
    return bytes_of(flat.untyped_storage(), offset, offset + flat.numel())


def _intact(flat: Tensor) -> bool:
    return int(flat.storage_offset()) + flat.numel() <= flat.untyped_storage().nbytes()
