"""Triton kernels, one operation a file, for what the compiler leaves far from the rate of memory.

Each file has `fits(*arguments)`, whether the kernel takes such tensors, and `run(*arguments)`, which does what the
plain function of the same arguments does (`slimpipe.kernels.fuse` chooses). For every kernel here

- nothing is compiled in mid-step: Triton compiles anew for other dtypes, for pointers that are not 16-byte aligned, and
  for integers that are 1 or divisible by 16. What varies from call to call is therefore exempt from that
  (`do_not_specialize`) and of one type (`tl.int64`), and `fits` takes aligned pointers alone;
- rows begin at multiples of 8 numbers (4 in `add`), and strides come divided by that: so the compiler, which is told no
  divisor, still reads 16 bytes at once;
- sums are taken in one order (no atomics), in fp32, and rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16)


def aligned(*tensors: Tensor) -> bool:
    """Of a dtype that the kernels take, at addresses divisible by 16 bytes."""
    # A list: a generator takes twice as long, before every launch.
    return all([x.dtype in DTYPES and x.data_ptr() % 16 == 0 for x in tensors])


def recorded(*tensors: Tensor) -> bool:
    """Whether autograd would record an operation on these, which it cannot for a kernel of our own."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def rows_fit(x: Tensor) -> bool:
    """Of [b, s, heads, d]: whether rows of d are in one piece, and begin at multiples of 8."""
    b, s, heads, _ = x.shape
    of_b, of_s, of_heads, last = x.stride()
    return last == 1 and (b == 1 or of_b % 8 == 0) and (s == 1 or of_s % 8 == 0) and (heads == 1 or of_heads % 8 == 0)


def power_of_two(number: int) -> int:
    """The least that is not below `number`."""
    return 1 << (number - 1).bit_length()
