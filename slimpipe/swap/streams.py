"""What the swap manager needs of a device: asynchronous copies in both directions, waits, memory, time.

Two implementations: `CudaStreams`, and `SimulatedStreams` on which every line of the manager is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Event = Any
"""The end of a copy, made by `copy_out` and `copy_in`. Opaque to all but the streams that made it."""
Mark = Any
"""A point of the compute stream's time. Opaque."""


class Streams(Protocol):
    """Copies run on streams of their own, one a direction, each in the order of the calls."""

    device: torch.device

    def copy_out(self, source: Tensor, host: Tensor, after: Sequence[Event]) -> Event:
        """Device to host, both uint8 of one length: after all that the current compute stream was given so far and
        after the events `after`. The caller keeps `source` alive until a compute stream has waited for the event."""
        ...

    def copy_in(self, host: Tensor, target: Tensor, after: Sequence[Event]) -> Event:
        """Host to device, else as `copy_out`. `target` may be read by a compute stream that waited for the event."""
        ...

    def copies(self, pairs: Sequence[tuple[Tensor, Tensor]], inward: bool, after: Sequence[Event]) -> Event:
        """(source, target) one after another, at least one, each as `copy_in` (`inward`) or `copy_out` has it: the end
        of the last."""
        ...

    def wait(self, event: Event) -> None:
        """The current compute stream does nothing more before the event. The host goes on."""
        ...

    def wait_everywhere(self, event: Event) -> None:
        """Every compute stream seen so far waits for the event: memory may go back to any of their pools then."""
        ...

    def done(self, event: Event) -> bool: ...

    def synchronize(self, event: Event) -> None:
        """The host waits for the event."""
        ...

    def empty(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] on the device, from the current compute stream's pool. Raises torch.OutOfMemoryError."""
        ...

    def current(self) -> Any:
        """The current compute stream, by which `use_here` knows where a tensor was allocated."""
        ...

    def use_here(self, tensor: Tensor, allocated_on: Any) -> None:
        """Says that the current compute stream uses a tensor that came from `allocated_on`'s pool."""
        ...

    def host_memory(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] of pinned host memory. Raises RuntimeError where there is none."""
        ...

    def watch(self, storage: torch.UntypedStorage) -> None:
        """A storage that counts as device memory; only simulated devices need to be told."""
        ...

    def aliases(self, storage: int) -> int:
        """References that a simulated device itself has to a storage (by its address)."""
        ...

    def memory_in_use(self) -> int:
        """Bytes of the device held by live tensors."""
        ...

    def peak_memory(self, restart: bool = False) -> int:
        """The most bytes in use since the last restart; `restart` begins anew."""
        ...

    def memory_size(self) -> int:
        """Bytes of memory that the device has."""
        ...

    def free_cached(self) -> None:
        """Gives cached blocks back to the device."""
        ...

    def at_operator(self, index: int) -> None:
        """The operator count of the compute stream; a simulated device's clock goes by it."""
        ...

    def mark(self) -> Mark: ...

    def passed(self, mark: Mark) -> bool:
        """Whether the device has come to the mark."""
        ...

    def seconds(self, begin: Mark, end: Mark) -> float:
        """Device seconds between two marks. Waits for `end`."""
        ...

    def rates(self) -> tuple[float, float]:
        """Bytes a second (out, in) of the host link when both directions run at once."""
        ...


def make_streams(device: torch.device) -> Streams:
    if device.type == "cuda":
        from slimpipe.swap.cuda_streams import CudaStreams

        return CudaStreams(device)
    from slimpipe.swap.simulated_streams import SimulatedStreams

    return SimulatedStreams()
