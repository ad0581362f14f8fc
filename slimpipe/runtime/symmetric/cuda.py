"""Streams, counters and arenas of CUDA, over `torch.distributed._symmetric_memory`.

NVLink multicast is never used: an arena is read and written peer by peer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slimpipe.runtime.symmetric.lane import Event

_MASK = 2**32 - 1


class CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        return self.event.query()


class Driver:
    """The driver's stream memory operations, which torch has no call for (it has one to write, none to wait).

    Raises OSError or AttributeError where the driver is missing or older than CUDA 12."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        arguments = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
        self._wait, self._write = self._library.cuStreamWaitValue32_v2, self._library.cuStreamWriteValue32_v2
        for call in (self._wait, self._write):
            call.argtypes, call.restype = arguments, ctypes.c_int

    def wait(self, stream: int, address: int, value: int) -> None:
        """Until the number at `address` is `value` or up to 2**31 - 1 more."""
        _check("cuStreamWaitValue32", self._wait(stream, address, value & _MASK, 0))

    def write(self, stream: int, address: int, value: int) -> None:
        """Behind a fence for the whole system."""
        _check("cuStreamWriteValue32", self._write(stream, address, value & _MASK, 0))


def _check(what: str, code: int) -> None:
    if code:
        raise RuntimeError(f"{what} failed: CUDA driver error {code}")


class CudaStream:
    def __init__(self, stream: torch.cuda.Stream, driver: Driver) -> None:
        self._stream, self._driver = stream, driver

    @torch.no_grad()
    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    @torch.no_grad()
    def add(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.add_(source)

    def wait_until(self, counter: Tensor, value: int) -> None:
        self._driver.wait(self._stream.cuda_stream, counter.data_ptr(), value)

    def set(self, counter: Tensor, value: int) -> None:
        self._driver.write(self._stream.cuda_stream, counter.data_ptr(), value)

    def record(self) -> CudaEvent:
        event = torch.cuda.Event()
        event.record(self._stream)
        return CudaEvent(event)

    def follow(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self._stream.wait_event(event.event)


class CudaDevice:
    """Of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._driver = device, Driver()

    def current(self) -> CudaStream:
        return CudaStream(torch.cuda.current_stream(self._device), self._driver)

    def side(self) -> CudaStream:
        # Of high priority: torch gives out 32 streams of each in turn, and NCCL's and others' are of the normal one.
        return CudaStream(torch.cuda.Stream(self._device, priority=-1), self._driver)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


class CudaArena:
    """Symmetric memory of `group`, whose members are the pipeline ranks `ranks` in this order. Collective over it."""

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], size: int, device: torch.device) -> None:
        # torch's name for this is private; slow to import, and not there in every build.
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed._symmetric_memory import rendezvous

        self._place = {rank: place for place, rank in enumerate(ranks)}
        # Not `_symmetric_memory.empty`: that takes from a pool, and before torch 2.13 two ranks could get blocks back
        # from it that had not met each other (pytorch/pytorch issue 190977).
        self._memory = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)
        self._memory.zero_()
        # Before others can write counters: they do so only once all have met.
        torch.cuda.synchronize(device)
        self._handle: Any = rendezvous(self._memory, group)

    def bytes(self, rank: int, start: int, size: int) -> Tensor:
        found: Tensor = self._handle.get_buffer(self._place[rank], (size,), torch.uint8, start)
        return found
