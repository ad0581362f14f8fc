"""`swiglu_forward` of slimpipe.kernels.swiglu: a program takes a piece of a row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from slimpipe.kernels.triton import aligned, power_of_two, recorded
from slimpipe.kernels.triton.launch import Launcher

WIDEST_BLOCK = 1024


def fits(gate_up: Tensor) -> bool:
    return (
        gate_up.numel() > 0
        and gate_up.shape[-1] % 16 == 0
        and gate_up.is_contiguous()
        and aligned(gate_up)
        and not recorded(gate_up)
    )


def run(gate_up: Tensor) -> Tensor:
    *outer, both = gate_up.shape
    inner = both // 2
    out = gate_up.new_empty(*outer, inner)
    block, columns = blocks(inner)
    grid = (out.numel() // inner * columns, 1, 1)
    _launch_swiglu(grid, (gate_up, out), (), (inner, columns, block), num_warps=4)
    return out


def blocks(inner: int) -> tuple[int, int]:
    """(numbers of a row that a program takes, how many do)."""
    block = min(WIDEST_BLOCK, power_of_two(inner))
    return block, -(-inner // block)


@triton.jit
def _swiglu(gate_up_pointer, out_pointer, INNER: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // COLUMNS).to(tl.int64)
    column = tl.program_id(0) % COLUMNS * BLOCK + tl.arange(0, BLOCK)
    inside = column < INNER
    gate = tl.load(gate_up_pointer + row * (2 * INNER) + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_pointer + row * (2 * INNER) + INNER + column, mask=inside, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_pointer + row * INNER + column, out.to(out_pointer.dtype.element_ty), mask=inside)


_launch_swiglu = Launcher(_swiglu)
