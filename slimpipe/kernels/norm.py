"""RMSNorm, alone and in front of a linear layer.

`norm_linear` exists for `memory.recompute: norms` (docs/recompute.md): the linear's weight gradient needs the
normalised input, which one cheap pass makes again from the input and one number a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimpipe.kernels.fuse import fused, fused_or_triton, upcast
from slimpipe.kernels.weight_grad import main_grad, matrix_gradient, vector_gradient


@fused
def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [.., H], weight [H] -> (y [.., H], rstd [.., 1]); statistics and product in fp32, rounded once."""
    wide = upcast(x)
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * rstd * upcast(weight)).to(x.dtype), rstd


@fused
def rms_norm_again(x: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    """y once more from what is saved; bit for bit what `rms_norm_forward` gave."""
    return (upcast(x) * rstd * upcast(weight)).to(x.dtype)


@fused_or_triton("slimpipe.kernels.triton.norm")
def rms_norm_backward(g: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(dx [.., H] in x's dtype, dweight [H] in fp32)."""
    wide_g, hat = upcast(g), upcast(x) * rstd
    scaled = wide_g * upcast(weight)
    dx = (scaled - hat * (scaled * hat).mean(-1, keepdim=True)) * rstd
    dweight = (wide_g * hat).flatten(0, -2).sum(0)
    return dx.to(x.dtype), dweight


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rstd = rms_norm_forward(x, weight, eps)
        ctx.save_for_backward(x, rstd, weight)
        ctx.acc = main_grad(weight)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, rstd, weight = ctx.saved_tensors
        dx, dweight = rms_norm_backward(g, x, rstd, weight)
        return dx, vector_gradient(ctx.acc, dweight, weight.dtype), None


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm_weight: Tensor, weight: Tensor, eps: float, keep: bool, rows: int | None
    ) -> Tensor:
        y, rstd = rms_norm_forward(x, norm_weight, eps)
        ctx.save_for_backward(x, rstd, norm_weight, weight, y if keep else None)
        ctx.norm_acc, ctx.acc = main_grad(norm_weight), main_grad(weight)
        if rows is None:
            return y @ weight.T
        out = y.new_empty(*y.shape[:-1], weight.shape[0])
        torch.mm(y.flatten(0, -2), weight[:rows].T, out=out.flatten(0, -2)[:, :rows])
        out[..., rows:].zero_()
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, rstd, norm_weight, weight, y = ctx.saved_tensors
        if y is None:
            y = rms_norm_again(x, rstd, norm_weight)
        dw = matrix_gradient(ctx.acc, g, y)
        del y
        dx, dnorm = rms_norm_backward(g @ weight, x, rstd, norm_weight)
        return dx, vector_gradient(ctx.norm_acc, dnorm, norm_weight.dtype), dw, None, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [.., H], weight [H] -> x / sqrt(mean(x^2) + eps) * weight, [.., H]."""
    return _RMSNorm.apply(x, weight, eps)


def norm_linear(
    x: Tensor, norm_weight: Tensor, weight: Tensor, eps: float, recompute: bool, rows: int | None = None
) -> Tensor:
    """rms_norm(x) W^T: x [.., H], norm_weight [H], weight [out, H] -> [.., out].

    With `recompute` the normalised x is not kept for the backward but made again there (bitwise the same). With `rows`
    only so many outputs are computed and the others are zero, whatever gradients come for them: for a run that is made
    for its backward alone, where the others' values are not read.
    """
    return _NormLinear.apply(x, norm_weight, weight, eps, not recompute, rows)
