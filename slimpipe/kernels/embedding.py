"""Token embedding, whole or a shard, whose gradient goes straight into fp32: no dense [V, H] gradient a slice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimpipe.kernels.weight_grad import main_grad


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        ctx.acc = main_grad(weight)
        return weight[tokens]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        tokens, weight = ctx.saved_tensors
        acc = ctx.acc
        target = torch.zeros_like(weight) if acc is None else acc
        target.index_add_(0, tokens.flatten(), g.flatten(0, -2).to(target.dtype))
        return None, target if acc is None else None


def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """tokens [b, s] int64, weight [V, H] -> [b, s, H]."""
    return _Embedding.apply(tokens, weight)


def shard_embedding(tokens: Tensor, weight: Tensor, first: int) -> Tensor:
    """tokens [b, s], weight [c, H] holding rows first .. first + c - 1 -> [b, s, H], zero for tokens of other shards.

    Shards are cut every c rows (first is a multiple of c), and the sum over the shards is the whole embedding, exactly.
    """
    here, index = _in_shard(tokens, weight.shape[0], first)
    return weight[index] * here[..., None].to(weight.dtype)


def add_shard_gradient(acc: Tensor, tokens: Tensor, gradient: Tensor, first: int) -> None:
    """Adds gradient [b, s, H] of the embedding's output into the rows acc [c, H] of the tokens [b, s] of this shard."""
    here, index = _in_shard(tokens, acc.shape[0], first)
    rows = (gradient * here[..., None].to(gradient.dtype)).to(acc.dtype)
    acc.index_add_(0, index.flatten(), rows.flatten(0, -2))


def _in_shard(tokens: Tensor, size: int, first: int) -> tuple[Tensor, Tensor]:
    """(whether each token is in the shard, its row there). Others get some row too, spread evenly: they add zeros."""
    return (tokens >= first) & (tokens < first + size), tokens % size
