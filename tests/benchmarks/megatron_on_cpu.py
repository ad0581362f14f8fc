"""megatron-core's schedules, DDP buffer and optimizer on a CPU: there is made what they make on "cuda" by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode


class _HostForCuda(TorchFunctionMode):
    """`device="cuda"` of any torch function means the CPU; a tensor says that its type is a GPU's."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.type and len(args) == 1:
            return function(*args).replace("torch.", "torch.cuda.")
        return function(*args, **kwargs)


@contextmanager
def on_cpu() -> Iterator[None]:
    """Within, megatron-core runs over gloo. Checkpointing (its recompute) still needs a GPU's random states."""
    with ExitStack() as stack:
        stack.enter_context(_HostForCuda())
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", lambda: "cpu"))
        for name in ("synchronize", "current_stream", "default_stream"):
            stack.enter_context(mock.patch.object(torch.cuda, name))
        yield
