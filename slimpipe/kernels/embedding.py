"""Token embedding whose gradient goes straight into fp32: no dense [V, H] gradient a slice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimpipe.kernels.weight_grad import main_grad


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        return weight[tokens]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        tokens, weight = ctx.saved_tensors
        acc = main_grad(weight)
        target = torch.zeros_like(weight) if acc is None else acc
        target.index_add_(0, tokens.flatten(), g.flatten(0, -2).to(target.dtype))
        return None, target if acc is None else None


def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """tokens [b, s] int64, weight [V, H] -> [b, s, H]."""
    return _Embedding.apply(tokens, weight)
