"""`_merge_into` of slimpipe.kernels.merge, for two to four partials: each is read once.

A program takes 8 tokens of 4 heads: LSEs are laid out by heads and outs by tokens, and so it reads at least 32 bytes
in a row of the one and a kilobyte of the other (at 128 numbers a head in bf16).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slimpipe.kernels.triton import aligned, power_of_two, recorded, rows_fit
from slimpipe.kernels.triton.launch import Launcher

MOST_PARTS = 4
WIDEST = 256
TOKENS, HEADS = 8, 4


def fits(outs_BsHD: list[Tensor], lses_BHs: list[Tensor], out_BsHD: Tensor) -> bool:
    return (
        2 <= len(outs_BsHD) <= MOST_PARTS
        and out_BsHD.numel() > 0
        and out_BsHD.shape[-1] <= WIDEST
        and out_BsHD.is_contiguous()
        and all([lse.is_contiguous() and lse.dtype == torch.float32 for lse in lses_BHs])
        and all([part.dtype == out_BsHD.dtype and rows_fit(part) for part in (*outs_BsHD, out_BsHD)])
        and aligned(*outs_BsHD, *lses_BHs, out_BsHD)
        and not recorded(*outs_BsHD, *lses_BHs)
    )


def run(outs_BsHD: list[Tensor], lses_BHs: list[Tensor], out_BsHD: Tensor) -> Tensor:
    b, s, h, d = out_BsHD.shape
    lse_BHs = torch.empty_like(lses_BHs[0])
    missing = [None] * (MOST_PARTS - len(outs_BsHD))
    strides = [n // 8 for part in outs_BsHD for n in part.stride()[:3]] + [0, 0, 0] * len(missing)
    head_blocks = -(-h // HEADS)
    _launch_merge(
        (head_blocks * -(-s // TOKENS), b, 1),
        (*outs_BsHD, *missing, *lses_BHs, *missing, out_BsHD, lse_BHs),
        (*strides, s, h, head_blocks),
        (len(outs_BsHD), d, power_of_two(d), TOKENS, HEADS),
        num_warps=4,
    )
    return lse_BHs


@triton.jit
def _load(out, lse, b, s, h, d, b8, s8, h8, lse_at, row, inside):
    """A partial's tile [rows, d] and its LSEs [rows]; strides are in eighths."""
    begin = b * (b8 * 8) + s * (s8 * 8) + h * (h8 * 8)
    part = tl.load(out + begin[:, None] + d, mask=inside, other=0.0).to(tl.float32)
    part_lse = tl.load(lse + lse_at, mask=row, other=float("-inf"))
    # What a kernel writes for a query without keys is its own business (0, or NaN), and 0 * NaN is NaN.
    return tl.where((part_lse == float("-inf"))[:, None], 0.0, part), part_lse


@triton.jit(
    do_not_specialize=[
        *(f"{axis}{part}" for part in range(4) for axis in ("b", "s", "h")),
        "tokens",
        "heads",
        "head_blocks",
    ]
)
def _merge(
    out0,
    out1,
    out2,
    out3,
    lse0,
    lse1,
    lse2,
    lse3,
    merged,
    merged_lse,
    b0: tl.int64,
    s0: tl.int64,
    h0: tl.int64,
    b1: tl.int64,
    s1: tl.int64,
    h1: tl.int64,
    b2: tl.int64,
    s2: tl.int64,
    h2: tl.int64,
    b3: tl.int64,
    s3: tl.int64,
    h3: tl.int64,
    tokens: tl.int64,
    heads: tl.int64,
    head_blocks: tl.int64,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
):
    tile = tl.arange(0, TOKENS * HEADS)
    b = tl.program_id(1).to(tl.int64)
    s = tl.program_id(0) // head_blocks * TOKENS + tile // HEADS
    h = tl.program_id(0) % head_blocks * HEADS + tile % HEADS
    d = tl.arange(0, BLOCK)[None, :]
    row = (s < tokens) & (h < heads)
    inside = row[:, None] & (d < WIDTH)
    lse_at = (b * heads + h) * tokens + s

    part0, top0 = _load(out0, lse0, b, s, h, d, b0, s0, h0, lse_at, row, inside)
    part1, top1 = _load(out1, lse1, b, s, h, d, b1, s1, h1, lse_at, row, inside)
    highest = tl.maximum(top0, top1)
    if PARTS > 2:
        part2, top2 = _load(out2, lse2, b, s, h, d, b2, s2, h2, lse_at, row, inside)
        highest = tl.maximum(highest, top2)
    if PARTS > 3:
        part3, top3 = _load(out3, lse3, b, s, h, d, b3, s3, h3, lse_at, row, inside)
        highest = tl.maximum(highest, top3)
    # A finite stand-in where no partial has keys: -inf - -inf would be NaN.
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    weight0, weight1 = tl.exp(top0 - highest), tl.exp(top1 - highest)
    total = weight0 + weight1
    out = weight0[:, None] * part0 + weight1[:, None] * part1
    if PARTS > 2:
        weight2 = tl.exp(top2 - highest)
        total += weight2
        out += weight2[:, None] * part2
    if PARTS > 3:
        weight3 = tl.exp(top3 - highest)
        total += weight3
        out += weight3[:, None] * part3
    out /= tl.where(total == 0.0, 1.0, total)[:, None]
    at = (((b * tokens + s) * heads + h) * WIDTH)[:, None] + d
    tl.store(merged + at, out.to(merged.dtype.element_ty), mask=inside)
    tl.store(merged_lse + lse_at, highest + tl.log(total), mask=row)


_launch_merge = Launcher(_merge)
