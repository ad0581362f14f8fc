"""`add_rms_norm_forward` of slimpipe.kernels.norm: each program has whole rows, and reads them once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slimpipe.kernels.triton import aligned, recorded
from slimpipe.kernels.triton.launch import Launcher
from slimpipe.kernels.triton.norm import WIDEST, tile


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
    h, y = torch.empty_like(x), torch.empty_like(x)
    return h, y, launch(x, delta, weight, h, y, eps)


def launch(x: Tensor, delta: Tensor | None, weight: Tensor, h: Tensor | None, y: Tensor, eps: float) -> Tensor:
    """Fills h with x + delta and y with its norm; without delta and h, y with x's. Returns rstd [.., 1]."""
    hidden = x.shape[-1]
    rows = x.numel() // hidden
    block, tile_rows, warps = tile(hidden)
    rstd = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    grid = (-(-rows // tile_rows), 1, 1)
    # An eps of 1 would be a constant of the code, and that of all launches behind it.
    numbers = float(eps), rows
    _launch_add_norm(grid, (x, delta, weight, h, y, rstd), numbers, (hidden, block, tile_rows), warps)
    return rstd


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
    rounded = tl.load(x_pointer + at, mask=inside, other=0.0).to(tl.float32)
    if delta_pointer is not None:
        delta = tl.load(delta_pointer + at, mask=inside, other=0.0).to(tl.float32)
        h = (rounded + delta).to(h_pointer.dtype.element_ty)
        tl.store(h_pointer + at, h, mask=inside)
        rounded = h.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(rounded * rounded, axis=1, keep_dims=True) / HIDDEN + eps)
    tl.store(rstd_pointer + row, rstd, mask=row < rows)
    weight = tl.load(weight_pointer + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
    y = rounded * rstd * weight
    tl.store(y_pointer + at, y.to(y_pointer.dtype.element_ty), mask=inside)


_launch_add_norm = Launcher(_add_norm)
