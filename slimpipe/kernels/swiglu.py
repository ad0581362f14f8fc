"""SwiGLU and the down projection behind it.

`memory.recompute: norms` (docs/recompute.md) does not keep the product silu(gate) * up: the backward has gate and up
anyway and makes it again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimpipe.kernels.fuse import fused, fused_or_triton, upcast
from slimpipe.kernels.once import once_differentiable
from slimpipe.kernels.weight_grad import main_grad, matrix_gradient


@fused_or_triton("slimpipe.kernels.triton.swiglu")
def swiglu_forward(gate_up: Tensor) -> Tensor:
    """gate_up [.., 2 I], gate first -> silu(gate) * up [.., I]; taken in fp32, rounded once."""
    gate, up = upcast(gate_up).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


@fused_or_triton("slimpipe.kernels.triton.swiglu_backward")
def swiglu_backward(g: Tensor, gate_up: Tensor) -> Tensor:
    """g [.., I] -> gradient of gate_up [.., 2 I]."""
    out = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
    swiglu_backward_into(_rows(g), _rows(gate_up), *_rows(out).chunk(2, -1))
    return out


def _rows(x: Tensor) -> Tensor:
    """[.., k] -> [t, k], one row for a single vector."""
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


@fused
def swiglu_backward_into(g: Tensor, gate_up: Tensor, dgate: Tensor, dup: Tensor) -> None:
    """g [t, I], gate_up [t, 2 I]; dgate, dup: [t, I] each, the halves of one tensor.

    Into two outputs, for the compiler makes `torch.cat` read all inputs twice (1.8 times the time on an H200); and
    flat, for in three dimensions it does not see that the halves do not overlap.
    """
    gate, up = upcast(gate_up).chunk(2, -1)
    wide_g = upcast(g)
    sigmoid = torch.sigmoid(gate)
    dgate.copy_(wide_g * up * sigmoid * (1 + gate * (1 - sigmoid)))
    dup.copy_(wide_g * gate * sigmoid)


class _SwiGLULinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor, keep: bool) -> Tensor:
        product = swiglu_forward(gate_up)
        ctx.save_for_backward(gate_up, weight, product if keep else None)
        ctx.acc = main_grad(weight)
        return product @ weight.T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, weight, product = ctx.saved_tensors
        if product is None:
            product = swiglu_forward(gate_up)
        dw = matrix_gradient(ctx.acc, g, product)
        del product
        return swiglu_backward(g @ weight, gate_up), dw, None


def swiglu_linear(gate_up: Tensor, weight: Tensor, recompute: bool) -> Tensor:
    """(silu(gate) * up) W^T: gate_up [.., 2 I] with gate first, weight [H, I] -> [.., H]."""
    return _SwiGLULinear.apply(gate_up, weight, not recompute)
