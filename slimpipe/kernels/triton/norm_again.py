"""`rms_norm_again` of slimpipe.kernels.norm: the products of `add_norm`'s kernel, in its order, so to its bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slimpipe.kernels.triton import aligned, recorded
from slimpipe.kernels.triton.launch import Launcher
from slimpipe.kernels.triton.norm import WIDEST, tile


def fits(x: Tensor, rstd: Tensor, weight: Tensor) -> bool:
    return (
        x.shape[-1] <= WIDEST
        and x.numel() > 0
        and rstd.dtype == torch.float32
        and x.is_contiguous()
        and rstd.is_contiguous()
        and weight.is_contiguous()
        and aligned(x, rstd, weight)
        and not recorded(x, rstd, weight)
    )


def run(x: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    hidden = x.shape[-1]
    rows = x.numel() // hidden
    block, tile_rows, warps = tile(hidden)
    y = torch.empty_like(x)
    _launch_again((-(-rows // tile_rows), 1, 1), (x, rstd, weight, y), (rows,), (hidden, block, tile_rows), warps)
    return y


@triton.jit(do_not_specialize=["rows"])
def _again(
    x_pointer,
    rstd_pointer,
    weight_pointer,
    y_pointer,
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
    rstd = tl.load(rstd_pointer + row, mask=row < rows, other=0.0)
    weight = tl.load(weight_pointer + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
    y = x * rstd * weight
    tl.store(y_pointer + at, y.to(y_pointer.dtype.element_ty), mask=inside)


_launch_again = Launcher(_again)
