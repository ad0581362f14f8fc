"""Cross-entropy over a shard of the vocabulary, and the whole loss where one process has all of it.

Two steps. `shard_statistics` takes a shard's logits to three numbers a token; put together over the shards they give
the loss (`token_losses`) and the global log-sum-exp; `shard_gradient` then turns the logits into their gradient, in
place. A vocabulary in one piece is the case of one shard. Logits live in the compute dtype, everything derived from
them in fp32.

Padding rows (a shard's rows behind `rows`) never enter a softmax and get no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slimpipe.kernels.fuse import fused, upcast
from slimpipe.kernels.weight_grad import add_matmul, main_grad

IGNORE = -100


@dataclass(frozen=True)
class Loss:
    """What is minimised: (1 - e) nll + e mean over the vocabulary of -log p + z lse^2, e `smoothing`, z `z_loss`.

    z_loss keeps the log-sum-exp near 0 (PaLM, section 5).
    """

    z_loss: float = 0.0
    smoothing: float = 0.0


@dataclass(frozen=True)
class Rows:
    """Which rows of a vocabulary of `total` a shard holds: `count` of them from `first` on; the rest is padding."""

    first: int
    count: int
    total: int


@fused
def shard_statistics(logits: Tensor, labels: Tensor, first: int, count: int) -> Tensor:
    """logits [t, c], labels [t] -> [3, t] fp32: the shard's log-sum-exp, the label's logit (0 elsewhere), the logits'
    sum.

    With no rows (count 0) the log-sum-exp is -inf.
    """
    wide = upcast(logits)
    real = torch.arange(logits.shape[-1], device=logits.device) < count
    lse = torch.logsumexp(wide.masked_fill(~real, float("-inf")), -1)
    here = (labels >= first) & (labels < first + count)
    index = torch.where(here, labels - first, 0)
    target = torch.where(here, wide.gather(-1, index[:, None]).squeeze(-1), 0.0)
    return torch.stack((lse, target, wide.masked_fill(~real, 0.0).sum(-1)))


def join_statistics(parts: Tensor) -> Tensor:
    """[shards, 3, t] -> [3, t] of the whole vocabulary. In the shards' order, so the same on every rank to the bit."""
    return torch.stack((torch.logsumexp(parts[:, 0], 0), parts[:, 1].sum(0), parts[:, 2].sum(0)))


def token_losses(statistics: Tensor, labels: Tensor, total: int, loss: Loss) -> Tensor:
    """[3, t] of the whole vocabulary, labels [t] -> loss of each token [t] fp32; 0 where the label is -100."""
    lse, target, logits_sum = statistics
    losses = lse - (1 - loss.smoothing) * target
    if loss.smoothing:
        losses = losses - loss.smoothing / total * logits_sum
    if loss.z_loss:
        losses = losses + loss.z_loss * lse.square()
    return torch.where(labels == IGNORE, 0.0, losses)


@fused
def shard_gradient(
    logits: Tensor,
    labels: Tensor,
    lse: Tensor,
    scale: Tensor,
    first: int,
    count: int,
    total: int,
    z_loss: float,
    smoothing: float,
) -> None:
    """Replaces logits [t, c] by scale times the gradient of the tokens' losses with respect to them.

    labels [t], lse [t] over the whole vocabulary, scale [] fp32.
    """
    wide = upcast(logits)
    weight = (labels != IGNORE).to(wide.dtype) * scale
    column = torch.arange(logits.shape[-1], device=logits.device)
    hot = (column == (labels - first)[:, None]).to(wide.dtype)
    gradient = torch.exp(wide - lse[:, None]) * (1 + 2 * z_loss * lse)[:, None] - (1 - smoothing) * hot
    gradient = (gradient - smoothing / total) * weight[:, None]
    logits.copy_(gradient.masked_fill(column >= count, 0.0))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor, chunk: int, loss: Loss
    ) -> Tensor:
        x, flat = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        total = weight.shape[0]
        found = torch.zeros((), dtype=scale.dtype, device=hidden.device)
        need_x, need_w = ctx.needs_input_grad[:2]
        dx = torch.empty_like(x) if need_x else None
        acc = main_grad(weight)
        dw = None
        if need_w:
            dw = torch.zeros_like(weight, dtype=scale.dtype) if acc is None else acc
        for start in range(0, x.shape[0], chunk):
            rows = slice(start, start + chunk)
            logits = x[rows] @ weight.T
            statistics = shard_statistics(logits, flat[rows], 0, total)
            found += token_losses(statistics, flat[rows], total, loss).sum() * scale
            shard_gradient(logits, flat[rows], statistics[0], scale, 0, total, total, loss.z_loss, loss.smoothing)
            if dx is not None:
                torch.mm(logits, weight, out=dx[rows])
            if dw is not None:
                add_matmul(dw, logits, x[rows])
        ctx.save_for_backward(dx.view_as(hidden) if dx is not None else None)
        ctx.dw = None if acc is not None or dw is None else dw.to(weight.dtype)
        return found

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (dx,) = ctx.saved_tensors
        # The weight's part is final once the forward has run: the caller's gradient of the loss must be 1.
        return dx, ctx.dw, None, None, None, None


def linear_token_losses(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, loss: Loss) -> Tensor:
    """hidden [b, s, H] -> the loss of each token [b, s] fp32, not scaled, 0 where the label is -100; no gradient."""
    x, flat, total = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1), weight.shape[0]
    parts = []
    for start in range(0, x.shape[0], chunk):
        rows = slice(start, start + chunk)
        statistics = shard_statistics(x[rows] @ weight.T, flat[rows], 0, total)
        parts.append(token_losses(statistics, flat[rows], total, loss))
    return torch.cat(parts).view_as(labels)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor, chunk: int, loss: Loss
) -> Tensor:
    """scale * sum of the losses of logits hidden W^T over tokens whose label is not -100, with no logits kept.

    hidden [b, s, H], weight [V, H], labels [b, s] int64 already shifted, scale [] fp32 -> [] in scale's dtype. The
    scale (1 / valid tokens of the step) is known beforehand, so the forward makes the gradients too: `chunk` tokens'
    logits live from their GEMM to the two gradient GEMMs, and what waits for the backward is one hidden-sized tensor.
    `backward` therefore takes the loss's own gradient to be 1.
    """
    return _LinearCrossEntropy.apply(hidden, weight, labels, scale, chunk, loss)
