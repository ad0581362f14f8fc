"""`fused`: an elementwise function that runs compiled, or as a Triton kernel, on a GPU and eagerly on the CPU.

Inductor turns a chain of elementwise operations and row reductions into one pass over memory, which is what these
functions cost; docs/h200.md has the LSE merge at 0.106 ms compiled against 0.507 ms eager. Where its code is far from
what memory allows there is a kernel by hand (slimpipe/kernels/triton). On the CPU compilation would cost more than the
tests that use it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Generic, Literal, ParamSpec, Protocol, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

Form = Literal["triton", "compiled", "plain"]

ON_GPUS: Final[Mapping[str, Sequence[Form]]] = MappingProxyType(
    {
        "rms_norm_backward": ("triton", "compiled"),
        "rms_norm_forward": ("triton", "compiled"),
        "rms_norm_again": ("triton", "compiled"),
        # Compiled, the norm would be that of a sum that is not rounded.
        "add_rms_norm_forward": ("triton", "plain"),
        "_merge_into": ("triton", "compiled"),
        # Its lengths are those of all pasts, and the compiler would make code for each.
        "add_pairs": ("triton", "plain"),
        "swiglu_forward": ("triton", "compiled"),
        # Plain it calls a function that runs compiled.
        "swiglu_backward": ("triton", "plain"),
        "rotate_heads": ("triton", "compiled"),
        "rotate_heads_back": ("triton", "compiled"),
    }
)
"""By a function's name, the forms that a GPU runs it in: the first that takes its arguments. Others run compiled.

`python -m benchmarks.fused` times all forms; one that does not win is taken out here, and nowhere else.
"""


class TritonForm(Protocol):
    """A module of slimpipe.kernels.triton, with the arguments of the plain function."""

    def fits(self, *arguments: Any) -> bool:
        """Whether the kernel takes these. Must not change over the calls of a step: another form would be compiled in
        the middle of it."""
        ...

    def run(self, *arguments: Any) -> Any: ...


class Fused(Generic[P, R]):
    """Callable that picks a form for CUDA tensors. `.plain` is the function itself, for comparison; `triton_module` is
    where its Triton form lies, if it has one."""

    def __init__(self, plain: Callable[P, R], triton_module: str | None = None) -> None:
        self.plain, self._triton_module = plain, triton_module
        self.on_gpus = ON_GPUS.get(plain.__name__, ("compiled",))
        functools.update_wrapper(self, plain)

    @functools.cached_property
    def compiled(self) -> Callable[P, R]:
        # dynamic=False: a run has a handful of shapes, all met in the warm-up; specialised code is faster.
        return torch.compile(self.plain, dynamic=False)

    @functools.cached_property
    def triton(self) -> TritonForm | None:
        """None where there is no Triton form, or no Triton."""
        if self._triton_module is None or not _has_triton():
            return None
        form: Any = importlib.import_module(self._triton_module)
        return form

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if not runs_compiled(args[0]):
            return self.plain(*args, **kwargs)
        for form in self.on_gpus:
            if form == "triton":
                if runs_triton(args[0]) and self.triton is not None and self.triton.fits(*args, **kwargs):
                    return self.triton.run(*args, **kwargs)
            elif form == "compiled":
                return self.compiled(*args, **kwargs)
        return self.plain(*args, **kwargs)


def runs_compiled(argument: Any) -> bool:
    """Whether a fused function runs compiled for such a first argument: its code is then for one set of shapes, of
    strides, and for gradients recorded or not."""
    tensor = _tensor(argument)
    return tensor is not None and is_available(tensor.device)


def runs_triton(argument: Any) -> bool:
    """Whether Triton, which launches on the current device, reaches the memory of such a first argument."""
    tensor = _tensor(argument)
    return tensor is not None and tensor.is_cuda and tensor.get_device() == torch.cuda.current_device()


def _tensor(argument: Any) -> torch.Tensor | None:
    tensor = argument[0] if isinstance(argument, (list, tuple)) else argument
    return tensor if isinstance(tensor, torch.Tensor) else None


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


def fused_or_triton(module: str) -> Callable[[Callable[P, R]], Fused[P, R]]:
    """`fused`, for a function that `module` has a Triton form of."""
    return functools.partial(Fused, triton_module=module)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The precision that sums over values of `dtype` are taken in: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def upcast(x: torch.Tensor) -> torch.Tensor:
    """x in the precision that sums are taken in."""
    return x.to(wide(x.dtype))
