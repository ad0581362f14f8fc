"""What Triton would compile, told without a GPU: by its own key, for a stand-in of an H100."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock


class Variant(NamedTuple):
    """Code of a kernel. `key`: the arguments' types and what Triton takes for granted of them, constants, options."""

    kernel: str
    key: str


class _Driver:
    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return -1  # no device's cache


@contextmanager
def launches_noted(note: Callable[[Variant], object]) -> Iterator[None]:
    """Triton kernels are not launched, and take any tensors; what each launch would run is noted."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        binder = kernel.device_caches[-1][-1]
        _, specialization, parsed = binder(*arguments, debug=False, **options)
        note(Variant(kernel.fn.__qualname__, str((specialization, parsed))))

    with mock.patch.object(driver, "_active", _Driver()), mock.patch.object(JITFunction, "run", run):
        yield
