"""RMSNorm, alone and in front of a linear layer; with the residual addition before it.

`norm_linear` exists for `memory.recompute: norms` (docs/recompute.md): the linear's weight gradient needs the
normalised input, which one cheap pass makes again from the input and one number a row. `add_norm_linear` takes the
residual stream too: what is added to it comes in with the norm's forward, and its gradient with the norm's backward,
each in one pass over memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimpipe.kernels.fuse import fused_or_triton, upcast
from slimpipe.kernels.once import once_differentiable
from slimpipe.kernels.weight_grad import in_dtype, main_grad, matrix_gradient


@fused_or_triton("slimpipe.kernels.triton.norm_forward")
def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [.., H], weight [H] -> (y [.., H], rstd [.., 1]); statistics and product in fp32, rounded once."""
    wide = upcast(x)
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * rstd * upcast(weight)).to(x.dtype), rstd


@fused_or_triton("slimpipe.kernels.triton.add_norm")
def add_rms_norm_forward(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x and delta [.., H] -> (h = x + delta, and `rms_norm_forward` of it).

    The norm is that of h as it is rounded, from which a backward makes it again.
    """
    h = x + delta
    return h, *rms_norm_forward.plain(h, weight, eps)


@fused_or_triton("slimpipe.kernels.triton.norm_again")
def rms_norm_again(x: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    """y once more from what is saved; bit for bit what `rms_norm_forward` gave."""
    return (upcast(x) * rstd * upcast(weight)).to(x.dtype)


@fused_or_triton("slimpipe.kernels.triton.norm")
def rms_norm_backward(
    g: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, beside: Tensor | None = None, acc: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """(dx [.., H] in x's dtype, dweight [H] in fp32).

    `beside` [.., H]: a gradient that x has from elsewhere, added to dx before that is rounded. With `acc` [H] in fp32
    dweight is added into it, and None in its place.
    """
    wide_g, hat = upcast(g), upcast(x) * rstd
    scaled = wide_g * upcast(weight)
    dx = (scaled - hat * (scaled * hat).mean(-1, keepdim=True)) * rstd
    if beside is not None:
        dx = dx + beside
    dweight = (wide_g * hat).reshape(-1, x.shape[-1]).sum(0)
    if acc is None:
        return dx.to(x.dtype), dweight
    acc.add_(dweight)
    return dx.to(x.dtype), None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rstd = rms_norm_forward(x, weight, eps)
        ctx.save_for_backward(x, rstd, weight)
        ctx.acc = main_grad(weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, rstd, weight = ctx.saved_tensors
        dx, dweight = rms_norm_backward(g, x, rstd, weight, None, ctx.acc)
        return dx, in_dtype(dweight, weight.dtype), None


def add_and_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(h, and `rms_norm_forward` of it): h = x + delta, or x, as an autograd Function can return it."""
    if delta is None:
        # Not a view: where no gradients are recorded that would say it requires one, and have no graph.
        return x.detach(), *rms_norm_forward(x, weight, eps)
    return add_rms_norm_forward(x, delta, weight, eps)


class _AddNormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        delta: Tensor | None,
        norm_weight: Tensor,
        weight: Tensor,
        eps: float,
        keep: bool,
        rows: int | None,
    ) -> tuple[Tensor, Tensor]:
        h, y, rstd = add_and_norm(x, delta, norm_weight, eps)
        ctx.save_for_backward(h, rstd, norm_weight, weight, y if keep else None)
        ctx.norm_acc, ctx.acc = main_grad(norm_weight), main_grad(weight)
        ctx.set_materialize_grads(False)
        if rows is None:
            return y @ weight.T, h
        out = y.new_empty(*y.shape[:-1], weight.shape[0])
        torch.mm(y.reshape(-1, y.shape[-1]), weight[:rows].T, out=out.view(-1, out.shape[-1])[:, :rows])
        out[..., rows:].zero_()
        return out, h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None, beside: Tensor | None) -> tuple[Tensor | None, ...]:
        h, rstd, norm_weight, weight, y = ctx.saved_tensors
        dh, dnorm, dw = beside, None, None
        if g is not None:
            if y is None:
                y = rms_norm_again(h, rstd, norm_weight)
            dw = matrix_gradient(ctx.acc, g, y)
            del y
            dh, dnorm = rms_norm_backward(g @ weight, h, rstd, norm_weight, beside, ctx.norm_acc)
            dnorm = in_dtype(dnorm, norm_weight.dtype)
        return dh, dh if ctx.needs_input_grad[1] else None, dnorm, dw, None, None, None


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
    return add_norm_linear(x, None, norm_weight, weight, eps, recompute, rows)[0]


def add_norm_linear(
    x: Tensor,
    delta: Tensor | None,
    norm_weight: Tensor,
    weight: Tensor,
    eps: float,
    recompute: bool,
    rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(`norm_linear` of h, h), where h = x + delta [.., H], or x itself without a delta.

    The residual stream goes on with h, whose gradient the norm's backward takes up. h must not be changed in place.
    """
    return _AddNormLinear.apply(x, delta, norm_weight, weight, eps, not recompute, rows)
