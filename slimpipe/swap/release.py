"""Tensors whose copy to the host runs, each with the operator at which it is let go.

At that operator the compute stream waits for the copy and the reference is dropped: the memory returns to the compute
stream's pool at a known place. A prediction that is too early stalls the compute stream; it cannot corrupt. With the
C++ extension on a GPU, the allocator lets go of all of them when it runs short (csrc/pending.cpp,
csrc/cuda/pressure.cpp).
"""

from __future__ import annotations

import ctypes
import heapq
import warnings
import weakref
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from slimpipe.kernels.merge import extension_available
from slimpipe.swap.references import count_when_alone
from slimpipe.swap.saved import Saved, SavedReference
from slimpipe.swap.streams import Event, Streams


class Holder(Protocol):
    """Keeps tensors while they are copied. `take` gives one back, or None where it was let go under pressure."""

    name: str

    def hold(self, tensor: Tensor, event: Event) -> int: ...
    def take(self, number: int) -> Tensor | None: ...
    def version_when_drained(self, number: int) -> int: ...
    def compute_streams(self, streams: Streams) -> None: ...


class PythonHolder:
    """Lets go of nothing by itself: under memory pressure the queue drains only when the manager is asked next."""

    name = "python"

    def __init__(self) -> None:
        self._tensors: dict[int, Tensor] = {}
        self._next = 1

    def hold(self, tensor: Tensor, event: Event) -> int:
        self._next += 1
        self._tensors[self._next] = tensor
        return self._next

    def take(self, number: int) -> Tensor | None:
        return self._tensors.pop(number, None)

    def version_when_drained(self, number: int) -> int:
        return -1

    def compute_streams(self, streams: Streams) -> None:
        pass


class CudaHolder:
    """csrc/pending.cpp, drained by the CUDA allocator's callback of csrc/cuda/pressure.cpp."""

    name = "cpp"

    def __init__(self) -> None:
        folder = Path(__file__).resolve().parents[1]
        core, cuda = ctypes.CDLL(str(folder / "_C.so")), ctypes.CDLL(str(folder / "_C_cuda.so"))
        cuda.slimpipe_pressure_enable(ctypes.cast(core.slimpipe_pending_drain, ctypes.c_void_p))
        core.slimpipe_pending_set_wait(ctypes.cast(cuda.slimpipe_pressure_wait, ctypes.c_void_p))
        cuda.slimpipe_pressure_stream.argtypes = [ctypes.c_int64]
        cuda.slimpipe_pressure_drained.restype = ctypes.c_int64
        self._cuda, self._known = cuda, set[int]()

    def hold(self, tensor: Tensor, event: Event) -> int:
        return int(torch.ops.slimpipe.hold_pending(tensor, event.cuda_event, count_when_alone()))

    def drained(self) -> int:
        """Tensors whose memory was given up under pressure so far."""
        return int(self._cuda.slimpipe_pressure_drained())

    def take(self, number: int) -> Tensor | None:
        return torch.ops.slimpipe.take_pending(number)

    def version_when_drained(self, number: int) -> int:
        return int(torch.ops.slimpipe.drained_version(number))

    def compute_streams(self, streams: Streams) -> None:
        stream = streams.current().cuda_stream
        if stream not in self._known:
            self._known.add(stream)
            self._cuda.slimpipe_pressure_stream(stream)


def make_holder(device: torch.device) -> Holder:
    """The C++ one on a GPU where csrc/ was built with CUDA, else the Python one."""
    if device.type != "cuda" or not extension_available():
        return PythonHolder()
    try:
        return CudaHolder()
    except (OSError, AttributeError) as error:
        warnings.warn(
            f"swap: csrc/cuda is not built or does not load ({error}): memory of copies under way is given back at "
            "planned operators only, not when the allocator runs short",
            stacklevel=2,
        )
        return PythonHolder()


class ReleaseQueue:
    """In order of the planned operators. Holds no `Saved` alive: what autograd has dropped is skipped."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, SavedReference]] = []

    def add(self, saved: Saved, operator: float) -> None:
        heapq.heappush(self._heap, (operator, saved.serial, weakref.ref(saved)))

    @property
    def next_operator(self) -> float:
        return self._heap[0][0] if self._heap else float("inf")

    def first(self) -> Saved | None:
        return self._heap[0][2]()

    def pop(self) -> Saved | None:
        return heapq.heappop(self._heap)[2]()

    def __len__(self) -> int:
        return len(self._heap)

    def clear(self) -> list[Saved]:
        left = [saved for _, _, reference in self._heap if (saved := reference()) is not None]
        self._heap.clear()
        return left
