"""`fused`: an elementwise function that runs compiled on a GPU and eagerly on the CPU.

Inductor turns a chain of elementwise operations and row reductions into one pass over memory, which is what these
functions cost; docs/h200.md has the LSE merge at 0.106 ms compiled against 0.507 ms eager. On the CPU
compilation would cost more than the tests that use it.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


class Fused(Generic[P, R]):
    """Callable that picks the compiled form for CUDA tensors. `.plain` is the function itself, for comparison."""

    def __init__(self, plain: Callable[P, R]) -> None:
        self.plain = plain
        functools.update_wrapper(self, plain)

    @functools.cached_property
    def compiled(self) -> Callable[P, R]:
        # dynamic=False: a run has a handful of shapes, all met in the warm-up; specialised code is faster.
        return torch.compile(self.plain, dynamic=False)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if runs_compiled(args[0]):
            return self.compiled(*args, **kwargs)
        return self.plain(*args, **kwargs)


def runs_compiled(argument: Any) -> bool:
    """Whether a fused function runs compiled for such a first argument: its code is then for one set of shapes, of
    strides, and for gradients recorded or not."""
    tensor = argument[0] if isinstance(argument, (list, tuple)) else argument
    return isinstance(tensor, torch.Tensor) and is_available(tensor.device)


def is_available(device: torch.device) -> bool:
    """Whether fused functions run compiled on a device."""
    return device.type == "cuda" and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def fused(function: Callable[P, R]) -> Fused[P, R]:
    """Decorator. The function's first argument is a tensor (or a list of them); it has no effects but on tensors that
    it is given to fill."""
    return Fused(function)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The precision that sums over values of `dtype` are taken in: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def upcast(x: torch.Tensor) -> torch.Tensor:
    """x in the precision that sums are taken in."""
    return x.to(wide(x.dtype))
