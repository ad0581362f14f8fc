"""Sums of attention's gradients, taken in fp32 (fp64 for doubles) and rounded once to the dtype of the parts."""

from __future__ import annotations

import torch
from torch import Tensor

from slimpipe.kernels.fuse import fused, fused_or_triton, upcast

Pair = tuple[Tensor, Tensor]


def sum_rounded(parts: list[Tensor]) -> Tensor:
    """The sum of tensors of one shape and dtype, contiguous; one alone is returned as it is.

    Not differentiable: for inside of an autograd Function.
    """
    if len(parts) <= 2:  # adding two rounds once by itself
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]
    out = torch.empty(parts[0].shape, dtype=parts[0].dtype, device=parts[0].device)
    sum_into(parts, out)
    return out


@fused
def sum_into(parts: list[Tensor], out: Tensor) -> None:
    """In one pass, into a given output: what a compiled function returns has the strides its compiler likes."""
    total = upcast(parts[0])
    for part in parts[1:]:
        total = total + upcast(part)
    out.copy_(total)


@fused_or_triton("slimpipe.kernels.triton.add")
def add_pairs(parts: Pair, accs: Pair | None, outs: Pair) -> None:
    """out = acc + part, dK's and dV's [b, s, heads, d], in the wider precision of the two and rounded to out's as it is
    stored. `accs` None: out = part. An out may be its acc.

    Plain it is one kernel each: an elementwise operation computes in its inputs' common type and rounds as it stores.
    """
    if accs is None:
        for part, out in zip(parts, outs, strict=True):
            out.copy_(part)
    else:
        for acc, part, out in zip(accs, parts, outs, strict=True):
            torch.add(acc, part, out=out)


def add_rounded(accs: Pair, parts: Pair) -> Pair:
    """acc + part in acc's precision, rounded to part's dtype; contiguous. accs stay as they are."""
    first, second = (torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in parts)
    add_pairs(parts, accs, (first, second))
    return first, second
