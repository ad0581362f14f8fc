"""`rms_norm_backward` of slimpipe.kernels.norm: each program walks over rows and keeps its part of the weight's
gradient in registers; a second kernel adds the parts. x, g and `beside` are read once."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from slimpipe.kernels.triton import aligned, power_of_two, recorded
from slimpipe.kernels.triton.launch import Launcher

WIDEST = 16384
TILE = 4096
"""Numbers of x that a program holds at a time, where a row is not longer."""
STAGED_BYTES = 96 * 1024
"""Shared memory for rows on their way: two programs share the 227 KiB of an H100's or H200's multiprocessor."""


def fits(
    g: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, beside: Tensor | None = None, acc: Tensor | None = None
) -> bool:
    like_x = [g] if beside is None else [g, beside]
    tensors = [*like_x, x, rstd, weight] if acc is None else [*like_x, x, rstd, weight, acc]
    return (
        x.shape[-1] <= WIDEST
        and x.numel() > 0
        and all([tensor.shape == x.shape for tensor in like_x])
        and rstd.dtype == torch.float32
        and (acc is None or acc.dtype == torch.float32)
        and all([tensor.is_contiguous() for tensor in tensors])
        and aligned(*tensors)
        and not recorded(*tensors)
    )


def run(
    g: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, beside: Tensor | None = None, acc: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    hidden = x.shape[-1]
    block, tile_rows, warps = tile(hidden)
    beside_size = 0 if beside is None else beside.element_size()
    tile_bytes = tile_rows * block * (g.element_size() + x.element_size() + beside_size)
    programs = _multiprocessors(x.device) * (2 if block <= TILE else 1)
    dx = torch.empty_like(x)
    parts = torch.empty(programs, hidden, dtype=torch.float32, device=x.device)
    dweight = torch.empty(hidden, dtype=torch.float32, device=x.device) if acc is None else acc
    stages = max(1, min(3, STAGED_BYTES // tile_bytes))
    _launch_backward(
        (programs, 1, 1),
        (g, x, rstd, weight, beside, dx, parts),
        (x.numel() // hidden,),
        (hidden, block, tile_rows, programs, stages),
        warps,
    )
    columns = min(32, block)
    _launch_sum_parts(
        (-(-hidden // columns), 1, 1),
        (parts, dweight),
        (),
        (acc is not None, hidden, programs, 128, columns),
        num_warps=8,
    )
    return dx, dweight if acc is None else None


def tile(hidden: int) -> tuple[int, int, int]:
    """(numbers of a row, rows that a program holds at a time, its warps)."""
    block = power_of_two(hidden)
    rows = max(1, TILE // block)
    return block, rows, min(32, 8 * rows * block // TILE)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """4 on a CPU, for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@triton.jit(do_not_specialize=["rows"])
def _backward(
    g_pointer,
    x_pointer,
    rstd_pointer,
    weight_pointer,
    beside_pointer,
    dx_pointer,
    parts_pointer,
    rows: tl.int64,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_pointer + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
    dweight = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for first in tl.range(program.to(tl.int64) * ROWS, rows, PROGRAMS * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)[:, None]
        at = row * HIDDEN + column
        inside = (row < rows) & (column < HIDDEN)
        g = tl.load(g_pointer + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_pointer + at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_pointer + row, mask=row < rows, other=0.0)
        hat = x * rstd
        scaled = g * weight
        mean = tl.sum(scaled * hat, axis=1, keep_dims=True) / HIDDEN
        dx = (scaled - hat * mean) * rstd
        if beside_pointer is not None:
            dx += tl.load(beside_pointer + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_pointer + at, dx.to(dx_pointer.dtype.element_ty), mask=inside)
        dweight += g * hat
    part = tl.sum(dweight, axis=0, keep_dims=True)
    tl.store(parts_pointer + program * HIDDEN + column, part, mask=column < HIDDEN)


@triton.jit
def _sum_parts(
    parts_pointer,
    out_pointer,
    ADD: tl.constexpr,
    HIDDEN: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in tl.static_range(0, PARTS, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < PARTS) & (column < HIDDEN)[None, :]
        total += tl.load(parts_pointer + row * HIDDEN + column[None, :], mask=inside, other=0.0)
    out = tl.sum(total, axis=0)
    if ADD:
        out += tl.load(out_pointer + column, mask=column < HIDDEN, other=0.0)
    tl.store(out_pointer + column, out, mask=column < HIDDEN)


_launch_backward, _launch_sum_parts = Launcher(_backward), Launcher(_sum_parts)
