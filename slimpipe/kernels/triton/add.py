"""`add_pairs` of slimpipe.kernels.sums: two sums in one launch.

A thread takes four numbers in a row, 16 bytes in fp32 and 8 in bf16: with eight of bf16 values would change threads on
their way to fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slimpipe.kernels.sums import Pair
from slimpipe.kernels.triton import aligned, recorded
from slimpipe.kernels.triton.launch import Launcher

BLOCK = 2048


def fits(parts: Pair, accs: Pair | None, outs: Pair) -> bool:
    """Tensors [b, s, heads, d] of which each of b is one piece, of a length divisible by 4, that begins at a multiple
    of 4."""
    shape = parts[0].shape
    if len(shape) != 4 or 0 in shape:
        return False
    b, s, heads, d = shape
    inner = (heads * d, d, 1)
    if s * heads * d % 4:
        return False
    kinds = (parts, outs) if accs is None else (parts, accs, outs)
    for kind in kinds:
        if kind[0].dtype != kind[1].dtype:
            return False
        for x in kind:
            strides = x.stride()
            if x.shape != shape or strides[1:] != inner or (b > 1 and strides[0] % 4):
                return False
        if not aligned(*kind) or recorded(*kind):
            return False
    return True


def run(parts: Pair, accs: Pair | None, outs: Pair) -> None:
    b = parts[0].shape[0]
    numbers = parts[0].numel() // b
    read = accs if accs is not None else outs
    strides = [x.stride(0) // 4 for x in (*read, *parts, *outs)] if b > 1 else [0] * 6
    grid = (-(-numbers // BLOCK), b, 1)
    _launch_add(grid, (*read, *parts, *outs), (*strides, numbers // 4), (accs is not None, BLOCK), num_warps=4)


@triton.jit(do_not_specialize=["acc0_b", "acc1_b", "part0_b", "part1_b", "out0_b", "out1_b", "quarters"])
def _add(
    acc0,
    acc1,
    part0,
    part1,
    out0,
    out1,
    acc0_b: tl.int64,
    acc1_b: tl.int64,
    part0_b: tl.int64,
    part1_b: tl.int64,
    out0_b: tl.int64,
    out1_b: tl.int64,
    quarters: tl.int64,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < quarters * 4
    sum0 = tl.load(part0 + b * (part0_b * 4) + at, mask=inside).to(tl.float32)
    sum1 = tl.load(part1 + b * (part1_b * 4) + at, mask=inside).to(tl.float32)
    if ADD:
        sum0 += tl.load(acc0 + b * (acc0_b * 4) + at, mask=inside).to(tl.float32)
        sum1 += tl.load(acc1 + b * (acc1_b * 4) + at, mask=inside).to(tl.float32)
    tl.store(out0 + b * (out0_b * 4) + at, sum0.to(out0.dtype.element_ty), mask=inside)
    tl.store(out1 + b * (out1_b * 4) + at, sum1.to(out1.dtype.element_ty), mask=inside)


_launch_add = Launcher(_add)
