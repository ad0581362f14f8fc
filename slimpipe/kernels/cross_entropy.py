"""Output projection and cross-entropy in one, in chunks, with no logits kept.

The gradient's scale (1 / valid tokens of the step) is known before the schedule starts, so the forward can make the
gradients too: a chunk of logits lives from its GEMM to its two gradient GEMMs, and what waits for the slice's backward
is one hidden-sized tensor. The largest temporary is [chunk, V] in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimpipe.kernels.fuse import fused, upcast
from slimpipe.kernels.weight_grad import add_matmul, main_grad

IGNORE = -100


@fused
def _loss_and_dlogits(logits: Tensor, labels: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """logits [t, V], labels [t] -> (scaled loss sum [], scaled d-logits [t, V] in the logits' dtype)."""
    wide = upcast(logits)
    valid = labels != IGNORE
    target = torch.where(valid, labels, 0)
    lse = torch.logsumexp(wide, -1)
    picked = wide.gather(-1, target[:, None]).squeeze(-1)
    weight = valid.to(wide.dtype) * scale
    loss = ((lse - picked) * weight).sum()
    column = torch.arange(wide.shape[-1], device=wide.device)
    hot = (column[None, :] == target[:, None]).to(wide.dtype)
    return loss, ((torch.exp(wide - lse[:, None]) - hot) * weight[:, None]).to(logits.dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor, chunk: int) -> Tensor:
        x, flat = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        loss = torch.zeros((), dtype=scale.dtype, device=hidden.device)
        need_x, need_w = ctx.needs_input_grad[:2]
        dx = torch.empty_like(x) if need_x else None
        acc = main_grad(weight)
        dw = None
        if need_w:
            dw = torch.zeros_like(weight, dtype=scale.dtype) if acc is None else acc
        for start in range(0, x.shape[0], chunk):
            rows = slice(start, start + chunk)
            part, dlogits = _loss_and_dlogits(x[rows] @ weight.T, flat[rows], scale)
            loss += part
            if dx is not None:
                torch.mm(dlogits, weight, out=dx[rows])
            if dw is not None:
                add_matmul(dw, dlogits, x[rows])
        ctx.save_for_backward(dx.view_as(hidden) if dx is not None else None)
        ctx.dw = None if acc is not None or dw is None else dw.to(weight.dtype)
        return loss

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (dx,) = ctx.saved_tensors
        # The weight's part is final once the forward has run: the caller's gradient of the loss must be 1.
        return dx, ctx.dw, None, None, None


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor, chunk: int) -> Tensor:
    """scale * sum of -log softmax(hidden W^T)[label] over tokens whose label is not -100.

    hidden [b, s, H], weight [V, H], labels [b, s] int64 already shifted, scale [] fp32 -> [] in scale's dtype.
    Gradients are made in the forward, so `backward` takes the loss's own gradient to be 1. `chunk` tokens at a time.
    """
    return _LinearCrossEntropy.apply(hidden, weight, labels, scale, chunk)
