"""Sums of attention's gradients, taken in fp32 (fp64 for doubles) and rounded once to the dtype of the parts."""

from __future__ import annotations

import torch
from torch import Tensor

from slimpipe.kernels.fuse import fused, upcast


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


def add_rounded(acc: Tensor, part: Tensor) -> Tensor:
    """acc + part in acc's precision, rounded to part's dtype; contiguous. acc stays as it is.

    One kernel by itself: an elementwise operation computes in its inputs' common type and rounds as it stores.
    """
    out = torch.empty(part.shape, dtype=part.dtype, device=part.device)
    return torch.add(acc, part, out=out)
