"""Linear layer whose weight gradient goes straight into fp32 (docs/architecture.md)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimpipe.kernels.weight_grad import main_grad, matrix_gradient


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.acc = main_grad(weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        dx = g @ weight if ctx.needs_input_grad[0] else None
        dw = matrix_gradient(ctx.acc, g, x) if ctx.needs_input_grad[1] else None
        return dx, dw


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [.., in], weight [out, in] -> [.., out]."""
    return _Linear.apply(x, weight)
