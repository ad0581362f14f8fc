"""The gated feed-forward block behind its norm, of which only the input is kept (`memory.recompute: mlp` and above).

Its backward makes the norm's output, gate and up (one GEMM), and their product again; not the down projection, whose
value it does not need. With the residual stream as in `slimpipe.kernels.norm`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimpipe.kernels.norm import add_and_norm, rms_norm_backward, rms_norm_forward
from slimpipe.kernels.once import once_differentiable
from slimpipe.kernels.swiglu import swiglu_backward, swiglu_forward
from slimpipe.kernels.weight_grad import in_dtype, main_grad, matrix_gradient


class _AddNormSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        delta: Tensor | None,
        norm_weight: Tensor,
        gate_up: Tensor,
        down: Tensor,
        eps: float,
        value: bool,
    ) -> tuple[Tensor, Tensor]:
        if value:
            h, y, _ = add_and_norm(x, delta, norm_weight, eps)
            out = swiglu_forward(y @ gate_up.T) @ down.T
        else:
            h = x.detach() if delta is None else x + delta
            out = x.new_zeros(()).expand_as(x)
        ctx.save_for_backward(h, norm_weight, gate_up, down)
        ctx.norm_acc, ctx.gate_up_acc, ctx.down_acc = (main_grad(weight) for weight in (norm_weight, gate_up, down))
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return out, h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None, beside: Tensor | None) -> tuple[Tensor | None, ...]:
        h, norm_weight, gate_up, down = ctx.saved_tensors
        dh, dnorm, dgate_up, ddown = beside, None, None, None
        if g is not None:
            y, rstd = rms_norm_forward(h, norm_weight, ctx.eps)
            inner = y @ gate_up.T
            product = swiglu_forward(inner)
            ddown = matrix_gradient(ctx.down_acc, g, product)
            del product
            dinner = swiglu_backward(g @ down, inner)
            del inner
            dgate_up = matrix_gradient(ctx.gate_up_acc, dinner, y)
            del y
            dh, dnorm = rms_norm_backward(dinner @ gate_up, h, rstd, norm_weight, beside, ctx.norm_acc)
            dnorm = in_dtype(dnorm, norm_weight.dtype)
        return dh, dh if ctx.needs_input_grad[1] else None, dnorm, dgate_up, ddown, None, None


def norm_swiglu(
    x: Tensor, norm_weight: Tensor, gate_up: Tensor, down: Tensor, eps: float, value: bool = True
) -> Tensor:
    """(silu(gate) * up) D^T, where (gate, up) = rms_norm(x) U^T: x [.., H] -> [.., H].

    norm_weight [H], gate_up U [2 I, H] with gate's rows first, down D [H, I]. With `value` False nothing is computed
    and zeros are returned: for a run that is made for its backward alone.
    """
    return add_norm_swiglu(x, None, norm_weight, gate_up, down, eps, value)[0]


def add_norm_swiglu(
    x: Tensor,
    delta: Tensor | None,
    norm_weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    eps: float,
    value: bool = True,
) -> tuple[Tensor, Tensor]:
    """(`norm_swiglu` of h, h), where h = x + delta [.., H], or x itself without a delta. See `add_norm_linear`."""
    return _AddNormSwiGLU.apply(x, delta, norm_weight, gate_up, down, eps, value)
