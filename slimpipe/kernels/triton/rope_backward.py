"""`rotate_heads_back` of slimpipe.kernels.rope: all gradients of heads into one tensor, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from slimpipe.kernels.triton import aligned, recorded, rows_fit
from slimpipe.kernels.triton.launch import Launcher
from slimpipe.kernels.triton.rope import WIDEST, tables_fit, tile, turned


def fits(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> bool:
    return (
        dq.dim() == dk.dim() == dv.dim() == 4
        and dq.numel() > 0
        and dq.shape[-1] <= WIDEST
        and dq.shape[:2] == dk.shape[:2]
        and dq.shape[-1] == dk.shape[-1]
        and dk.shape == dv.shape
        and dq.dtype == dk.dtype == dv.dtype
        and rows_fit(dq)
        and rows_fit(dk)
        and rows_fit(dv)
        and tables_fit(dq, cos, sin)
        and aligned(dq, dk, dv)
        and not recorded(dq, dk, dv)
    )


def run(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    b, s, queries, d = dq.shape
    keys = dk.shape[2]
    heads = queries + 2 * keys
    dqkv = dq.new_empty(b, s, heads, d)
    block, rows = tile(d)
    strides = [n // 8 for x in (dq, dk, dv) for n in x.stride()[:3]]
    _launch_rotate_back(
        (-(-b * s // rows), heads, 1),
        (dq, dk, dv, cos, sin, dqkv),
        (*strides, b * s, s),
        (queries, keys, d, block, rows),
        num_warps=4,
    )
    return dqkv


@triton.jit
def _pair(pointer, b, s, h, b8, s8, h8, column, inside, HALF: tl.constexpr):
    """Both halves of a head; strides are in eighths."""
    at = b * (b8 * 8) + s * (s8 * 8) + h * (h8 * 8) + column
    first = tl.load(pointer + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(pointer + at + HALF, mask=inside, other=0.0).to(tl.float32)
    return first, second


@triton.jit(do_not_specialize=["qb", "qs", "qh", "kb", "ks", "kh", "vb", "vs", "vh", "rows", "tokens"])
def _rotate_back(
    dq_pointer,
    dk_pointer,
    dv_pointer,
    cos_pointer,
    sin_pointer,
    dqkv_pointer,
    qb: tl.int64,
    qs: tl.int64,
    qh: tl.int64,
    kb: tl.int64,
    ks: tl.int64,
    kh: tl.int64,
    vb: tl.int64,
    vs: tl.int64,
    vh: tl.int64,
    rows: tl.int64,
    tokens: tl.int64,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    HALF: tl.constexpr = WIDTH // 2
    head = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < HALF)
    b, s = row // tokens, row % tokens
    to = dqkv_pointer + (row * (QUERIES + 2 * KEYS) + head) * WIDTH + column
    if head < QUERIES + KEYS:
        if head < QUERIES:
            first, second = _pair(dq_pointer, b, s, head, qb, qs, qh, column, inside, HALF)
        else:
            first, second = _pair(dk_pointer, b, s, head - QUERIES, kb, ks, kh, column, inside, HALF)
        cos = tl.load(cos_pointer + s * HALF + column, mask=inside, other=0.0)
        sin = tl.load(sin_pointer + s * HALF + column, mask=inside, other=0.0)
        first, second = turned(first, second, cos, -sin)
    else:
        first, second = _pair(dv_pointer, b, s, head - QUERIES - KEYS, vb, vs, vh, column, inside, HALF)
    tl.store(to, first.to(dqkv_pointer.dtype.element_ty), mask=inside)
    tl.store(to + HALF, second.to(dqkv_pointer.dtype.element_ty), mask=inside)


_launch_rotate_back = Launcher(_rotate_back)
