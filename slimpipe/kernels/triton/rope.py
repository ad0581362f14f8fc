"""`rotate_heads` of slimpipe.kernels.rope: a program turns one head of some tokens, which it reads once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slimpipe.kernels.triton import aligned, power_of_two, recorded
from slimpipe.kernels.triton.launch import Launcher

WIDEST = 512
TILE = 2048
"""Pairs of numbers that a program holds."""


def fits(qkv: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int, int]) -> bool:
    return (
        qkv.dim() == 4
        and qkv.numel() > 0
        and qkv.shape[-1] <= WIDEST
        and qkv.is_contiguous()
        and tables_fit(qkv, cos, sin)
        and aligned(qkv)
        and not recorded(qkv)
    )


def tables_fit(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether `cos` and `sin` are what `rope_table` gives for x [b, s, heads, d]."""
    shape = (x.shape[1], 1, x.shape[-1] // 2)
    return (
        x.shape[-1] % 2 == 0
        and cos.shape == sin.shape == shape
        and cos.dtype == sin.dtype == torch.float32
        and cos.is_contiguous()
        and sin.is_contiguous()
        and aligned(cos, sin)
    )


def run(qkv: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    b, s, _, d = qkv.shape
    queries, keys, _ = heads
    q, k = qkv.new_empty(b, s, queries, d), qkv.new_empty(b, s, keys, d)
    block, rows = tile(d)
    grid = (-(-b * s // rows), queries + keys, 1)
    _launch_rotate(grid, (qkv, cos, sin, q, k), (b * s, s), (*heads, d, block, rows), num_warps=4)
    return q, k


def tile(d: int) -> tuple[int, int]:
    """(half a head's numbers, tokens) that a program holds."""
    block = power_of_two(d // 2)
    return block, max(1, TILE // block)


@triton.jit
def turned(first, second, cos, sin):
    return first * cos - second * sin, second * cos + first * sin


@triton.jit(do_not_specialize=["rows", "tokens"])
def _rotate(
    qkv_pointer,
    cos_pointer,
    sin_pointer,
    q_pointer,
    k_pointer,
    rows: tl.int64,
    tokens: tl.int64,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    HALF: tl.constexpr = WIDTH // 2
    head = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < HALF)
    of_token = row % tokens * HALF + column
    cos = tl.load(cos_pointer + of_token, mask=inside, other=0.0)
    sin = tl.load(sin_pointer + of_token, mask=inside, other=0.0)
    at = (row * (QUERIES + KEYS + VALUES) + head) * WIDTH + column
    first = tl.load(qkv_pointer + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(qkv_pointer + at + HALF, mask=inside, other=0.0).to(tl.float32)
    first, second = turned(first, second, cos, sin)
    first = first.to(q_pointer.dtype.element_ty)
    second = second.to(q_pointer.dtype.element_ty)
    if head < QUERIES:
        to = (row * QUERIES + head) * WIDTH + column
        tl.store(q_pointer + to, first, mask=inside)
        tl.store(q_pointer + to + HALF, second, mask=inside)
    else:
        to = (row * KEYS + head - QUERIES) * WIDTH + column
        tl.store(k_pointer + to, first, mask=inside)
        tl.store(k_pointer + to + HALF, second, mask=inside)


_launch_rotate = Launcher(_rotate)
