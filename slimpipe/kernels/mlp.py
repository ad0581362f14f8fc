"""The gated feed-forward block behind its norm, of which only the input is kept (`memory.recompute: mlp` and above).

Its backward makes the norm's output, gate and up (one GEMM), and their product again; not the down projection, whose
value it does not need.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slimpipe.kernels.norm import rms_norm_backward, rms_norm_forward
from slimpipe.kernels.swiglu import swiglu_backward, swiglu_forward
from slimpipe.kernels.weight_grad import main_grad, matrix_gradient, vector_gradient


class _NormSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm_weight: Tensor, gate_up: Tensor, down: Tensor, eps: float, value: bool
    ) -> Tensor:
        ctx.save_for_backward(x, norm_weight, gate_up, down)
        ctx.norm_acc, ctx.gate_up_acc, ctx.down_acc = (main_grad(weight) for weight in (norm_weight, gate_up, down))
        ctx.eps = eps
        if not value:
            return x.new_zeros(()).expand_as(x)
        y, _ = rms_norm_forward(x, norm_weight, eps)
        return swiglu_forward(y @ gate_up.T) @ down.T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, norm_weight, gate_up, down = ctx.saved_tensors
        y, rstd = rms_norm_forward(x, norm_weight, ctx.eps)
        inner = y @ gate_up.T
        product = swiglu_forward(inner)
        ddown = matrix_gradient(ctx.down_acc, g, product)
        del product
        dinner = swiglu_backward(g @ down, inner)
        del inner
        dgate_up = matrix_gradient(ctx.gate_up_acc, dinner, y)
        del y
        dx, dnorm = rms_norm_backward(dinner @ gate_up, x, rstd, norm_weight)
        return dx, vector_gradient(ctx.norm_acc, dnorm, norm_weight.dtype), dgate_up, ddown, None, None


def norm_swiglu(
    x: Tensor, norm_weight: Tensor, gate_up: Tensor, down: Tensor, eps: float, value: bool = True
) -> Tensor:
    """(silu(gate) * up) D^T, where (gate, up) = rms_norm(x) U^T: x [.., H] -> [.., H].

    norm_weight [H], gate_up U [2 I, H] with gate's rows first, down D [H, I]. With `value` False nothing is computed
    and zeros are returned: for a run that is made for its backward alone.
    """
    return _NormSwiGLU.apply(x, norm_weight, gate_up, down, eps, value)
