"""Copies of a rank's state in host memory, made while training goes on."""

from __future__ import annotations

import torch
from torch import Tensor

from slimpipe.train.checkpoint.errors import CheckpointError
from slimpipe.train.checkpoint.parts import State

_ALIGNMENT = 512  # bytes


class Staging:
    """On a GPU: one page-locked buffer, taken at once, which copies reach on a stream of their own, beside the next
    step's work. Only what changes the state has to wait for them, on the device (`hold`). On the CPU: plain copies.

    Taking page-locked memory may wait for the device: make one before the first step, when no receive is outstanding.
    """

    def __init__(self, state: State, device: torch.device) -> None:
        """`state` as it will be copied: the same names, shapes and types each time, but for what lies on the host."""
        self._places: dict[str, Tensor] = {}
        self._copied: torch.cuda.Event | None = None
        if device.type != "cuda":
            return
        on_device = {name: part.tensor for name, part in state.items() if part.tensor.is_cuda}
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in on_device.values()]
        self._buffer = _locked(sum(sizes))
        self._stream = torch.cuda.Stream(device)
        self._copied = torch.cuda.Event()
        for (name, tensor), room in zip(on_device.items(), self._buffer.split(sizes), strict=True):
            self._places[name] = room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def copy(self, state: State) -> State:
        """Begins to copy and returns the copies, there once `wait` has returned. Not before the last ones are done
        with."""
        if self._copied is None:
            return {name: part.on(part.tensor.detach().clone()) for name, part in state.items()}
        self._stream.wait_stream(torch.cuda.current_stream())
        copies = {}
        with torch.cuda.stream(self._stream):
            for name, part in state.items():
                tensor = part.tensor.detach()
                if tensor.is_cuda:
                    copies[name] = part.on(self._places[name].copy_(tensor, non_blocking=True))
                else:
                    copies[name] = part.on(tensor.clone())
            self._copied.record(self._stream)
        return copies

    def hold(self) -> None:
        """Has the device finish the copies before it goes on with what comes next on the current stream."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def wait(self) -> None:
        """Returns once the copies are there."""
        if self._copied is not None:
            self._copied.synchronize()

    def close(self) -> None:
        """Lets go of the memory."""
        if self._copied is not None:
            self.wait()
            torch.cuda.cudart().cudaHostUnregister(self._buffer.data_ptr())
            self._copied = None


def _locked(size: int) -> Tensor:
    """Page-locked bytes, exactly as many: torch's own pool would round up to a power of two."""
    try:
        buffer = torch.empty(size, dtype=torch.uint8)
        buffer.fill_(0)  # pages that are there are locked sooner
        code = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), size, 0))
    except RuntimeError as error:  # no memory
        raise _too_large(size, str(error).splitlines()[0]) from error
    if code != 0:
        raise _too_large(size, f"CUDA error {code}")
    return buffer


def _too_large(size: int, reason: str) -> CheckpointError:
    return CheckpointError(
        f"train.async_checkpoint = true: {size / 2**30:.1f} GiB of host memory for a copy of this rank's state "
        f"cannot be had ({reason}); set it to false"
    )
