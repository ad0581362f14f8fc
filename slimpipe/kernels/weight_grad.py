"""Weight gradients, summed in fp32 over the m n slices of a step (docs/architecture.md).

A step adds m n gradients into each weight; summed in bf16 the small ones vanish. A parameter that the engine trains
carries `main_grad`, an fp32 tensor of its shape, and the functions here add into it. Without one (the function is
used outside the engine) they return the gradient, for autograd to keep in the usual way.

A GEMM over the few tokens of a short slice spends much of its time on reading and writing the fp32 sum. A `main_grad`
with a `Waiting` (`train.weight_grad_slices`) lets several slices' factors wait and multiplies them as one.
"""

from __future__ import annotations

import torch
from torch import Tensor


def main_grad(parameter: Tensor) -> Tensor | None:
    return getattr(parameter, "main_grad", None)


def add_matmul(acc: Tensor, a: Tensor, b: Tensor) -> None:
    """acc [M, N] += a [K, M]^T @ b [K, N], the product taken and added in acc's precision.

    On a GPU with bf16 inputs this is one GEMM whose epilogue adds into fp32 (docs/h200.md: 663 TFLOP/s against
    523 for a GEMM and an add). The CPU has no such GEMM: there the inputs are widened first.
    """
    if a.dtype == acc.dtype:
        acc.addmm_(a.T, b)
    elif acc.is_cuda:
        torch.addmm(acc, a.T, b, out_dtype=acc.dtype, out=acc)
    else:
        acc.addmm_(a.T.to(acc.dtype), b.to(acc.dtype))


class Waiting:
    """Factors of a weight's gradient, up to those of `slices` backwards, that wait for their GEMM.

    Nobody changes them meanwhile: they are outputs of a backward's own kernels, and a reference to a gradient keeps
    autograd from adding into it.
    """

    def __init__(self, slices: int) -> None:
        self.slices = slices
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def add(self, acc: Tensor, g: Tensor, x: Tensor) -> None:
        """Keeps g [K, out] and x [K, in]; with the last of `slices` all of them are added into `acc`."""
        self._pairs.append((g, x))
        if len(self._pairs) == self.slices:
            self.flush(acc)

    def flush(self, acc: Tensor) -> None:
        """Adds what waits into `acc` [out, in]."""
        if len(self._pairs) == 1:
            add_matmul(acc, *self._pairs[0])
        elif self._pairs:
            add_matmul(acc, torch.cat([g for g, _ in self._pairs]), torch.cat([x for _, x in self._pairs]))
        self._pairs = []

    def clear(self) -> None:
        """Forgets what waits."""
        self._pairs = []


def waiting_of(acc: Tensor) -> Waiting | None:
    return getattr(acc, "waiting", None)


def matrix_gradient(acc: Tensor | None, g: Tensor, x: Tensor) -> Tensor | None:
    """Gradient of W [out, in] from y = x W^T: g [.., out]^T @ x [.., in]; None once added into `acc`, or waiting to be.

    `acc` is the weight's `main_grad` as the forward saw it: what a saved-tensor hook gives back in the backward may be
    another object, without the attribute.
    """
    g, x = g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1])
    if acc is None:
        return g.T @ x
    waiting = waiting_of(acc)
    if waiting is None:
        add_matmul(acc, g, x)
    else:
        waiting.add(acc, g, x)
    return None


def in_dtype(grad: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A gradient in its parameter's `dtype`, for autograd; None, one that has been added into `main_grad`, as it is."""
    return None if grad is None else grad.to(dtype)
