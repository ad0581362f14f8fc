"""`swiglu_backward` of slimpipe.kernels.swiglu: a program takes a piece of a row, of gate and of up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slimpipe.kernels.triton import aligned, recorded
from slimpipe.kernels.triton.launch import Launcher
from slimpipe.kernels.triton.swiglu import blocks


def fits(g: Tensor, gate_up: Tensor) -> bool:
    return (
        g.numel() > 0
        and gate_up.shape == (*g.shape[:-1], 2 * g.shape[-1])
        and g.dtype == gate_up.dtype
        and g.shape[-1] % 8 == 0
        and g.is_contiguous()
        and gate_up.is_contiguous()
        and aligned(g, gate_up)
        and not recorded(g, gate_up)
    )


def run(g: Tensor, gate_up: Tensor) -> Tensor:
    inner = g.shape[-1]
    out = torch.empty_like(gate_up)
    block, columns = blocks(inner)
    grid = (g.numel() // inner * columns, 1, 1)
    _launch_swiglu_backward(grid, (g, gate_up, out), (), (inner, columns, block), num_warps=4)
    return out


@triton.jit
def _swiglu_backward(
    g_pointer, gate_up_pointer, out_pointer, INNER: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):
    row = (tl.program_id(0) // COLUMNS).to(tl.int64)
    column = tl.program_id(0) % COLUMNS * BLOCK + tl.arange(0, BLOCK)
    inside = column < INNER
    at = row * (2 * INNER) + column
    g = tl.load(g_pointer + row * INNER + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_up_pointer + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_pointer + at + INNER, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    dgate = g * up * sigmoid * (1 + gate * (1 - sigmoid))
    dup = g * gate * sigmoid
    tl.store(out_pointer + at, dgate.to(out_pointer.dtype.element_ty), mask=inside)
    tl.store(out_pointer + at + INNER, dup.to(out_pointer.dtype.element_ty), mask=inside)


_launch_swiglu_backward = Launcher(_swiglu_backward)
