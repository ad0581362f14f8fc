"""`add_rms_norm_forward` of slimpipe.kernels.norm: each program has whole rows, and reads them once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slimpipe.kernels.triton import aligned, power_of_two, recorded
from slimpipe.kernels.triton.launch import Launcher
from slimpipe.kernels.triton.norm import TILE, WIDEST


def fits(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> bool:
    tensors = (x, delta, weight)
    return (
        x.shape[-1] <= WIDEST
        and x.numel() > 0
        and (delta.shape, delta.dtype) == (x.shape, x.dtype)
        and all(tensor.is_contiguous() for tensor in tensors)
        and aligned(*tensors)
        and not recorded(*tensors)
    )


def run(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    hidden = x.shape[-1]
    rows = x.numel() // hidden
    block = power_of_two(hidden)
    tile_rows = max(1, TILE // block)
    h, y = torch.empty_like(x), torch.empty_like(x)
    rstd = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    grid = (-(-rows // tile_rows), 1, 1)
    warps = min(32, 8 * tile_rows * block // TILE)
    _launch_add_norm(grid, (x, delta, weight, h, y, rstd), (eps, rows), (hidden, block, tile_rows), warps)
    return h, y, rstd


@triton.jit(do_not_specialize=["rows"])
def _add_norm(
    x_pointer,
    delta_pointer,
    weight_pointer,
    h_pointer,
    y_pointer,
    rstd_pointer,
    eps,
    rows: tl.int64,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    at = row * HIDDEN + column
    inside = (row < rows) & (column < HIDDEN)
    x = tl.load(x_pointer + at, mask=inside, other=0.0).to(tl.float32)
    delta = tl.load(delta_pointer + at, mask=inside, other=0.0).to(tl.float32)
    h = (x + delta).to(h_pointer.dtype.element_ty)
    tl.store(h_pointer + at, h, mask=inside)
    rounded = h.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(rounded * rounded, axis=1, keep_dims=True) / HIDDEN + eps)
    tl.store(rstd_pointer + row, rstd, mask=row < rows)
    weight = tl.load(weight_pointer + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
    y = rounded * rstd * weight
    tl.store(y_pointer + at, y.to(y_pointer.dtype.element_ty), mask=inside)


_launch_add_norm = Launcher(_add_norm)
