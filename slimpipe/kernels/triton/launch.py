"""Launches of Triton kernels by a handle.

Triton finds a kernel's code anew for every launch, from the type and value of each argument; that is most of what a
launch takes the host. Here the code is kept by the little that it depends on.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor


class Launcher:
    """Launches `kernel`, a function of `triton.jit` that takes tensors, then numbers, then constants.

    Its code depends on the tensors' device and dtypes, which of them are None, the constants and the warps alone: the
    tensors' addresses are divisible by 16, numbers are floats or exempt from specialization. `codes`: what has been
    compiled, by those.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.codes: dict[Hashable, Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[Tensor | None],
        numbers: Sequence[float],
        constants: tuple[int, ...],
        num_warps: int,
    ) -> None:
        """The first of `tensors` is not None, and on the current device."""
        first: Any = tensors[0]
        dtypes = [None if x is None else x.dtype for x in tensors]
        key = (first.get_device(), num_warps, constants, *dtypes)
        code = self.codes.get(key)
        if code is not None:
            code[grid](*tensors, *numbers, *constants)
            return
        code = self.kernel[grid](*tensors, *numbers, *constants, num_warps=num_warps)
        if code is not None:  # the interpreter has none
            self.codes[key] = code
