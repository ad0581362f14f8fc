"""Merge of attention partials by their log-sum-exp (LSE), rounded once.

A query that attends to disjoint ranges of keys in several kernel calls gets a partial `(out_i, lse_i)` from each. Over
the union of the ranges

    lse = log sum_i exp(lse_i)        out = sum_i exp(lse_i - lse) * out_i

All partials merge in one pass in fp32 (fp64 for doubles) and the result is rounded once: a chain of two-way merges in
bf16 rounds after each.

Two implementations: `cpp`, the operator of csrc/merge_lse.cpp for CPU tensors, where it was built; and `torch`, the
same in plain PyTorch, on any device.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from slimpipe.kernels.fuse import fused_or_triton

Implementation = Literal["auto", "cpp", "torch"]


def merge(
    outs_BsHD: Sequence[Tensor], lses_BHs: Sequence[Tensor], implementation: Implementation = "auto"
) -> tuple[Tensor, Tensor]:
    """Attention over the union of the partials' keys: `(out [b, s, h, d], lse [b, h, s])`.

    `outs_BsHD` are fp32, bf16 or fp64, all alike, with any strides; `lses_BHs` are fp32 (fp64 with fp64 outs). The
    result has the dtype of the outs and is contiguous; a single partial is returned as it is.

    A partial with LSE -inf (a query without keys) counts nothing, whatever its out holds; with -inf in all of them out
    is 0 and lse -inf.

    Not differentiable: it is meant for inside of an autograd Function, whose backward uses the merged out and LSE.
    Raises ValueError for partials that do not fit together, RuntimeError where a gradient would be lost or `cpp` is
    forced and cannot run.
    """
    _check(outs_BsHD, lses_BHs)
    on_cpu = outs_BsHD[0].device.type == "cpu"
    if implementation == "cpp" and not (on_cpu and extension_available()):
        raise RuntimeError(
            f"merge(implementation='cpp'): tensors on {outs_BsHD[0].device}, extension "
            f"{'built' if extension_available() else 'not built'}; it needs CPU tensors and a built csrc/ "
            "(pip install --no-build-isolation -e .)"
        )
    if len(outs_BsHD) == 1:
        return outs_BsHD[0], lses_BHs[0]
    if implementation == "cpp" or (implementation == "auto" and on_cpu and extension_available()):
        out, lse = torch.ops.slimpipe.merge_lse(list(outs_BsHD), list(lses_BHs))
        return out, lse
    out = torch.empty(outs_BsHD[0].shape, dtype=outs_BsHD[0].dtype, device=outs_BsHD[0].device)
    return out, _merge_into(list(outs_BsHD), list(lses_BHs), out)


def merge_reference(outs_BsHD: Sequence[Tensor], lses_BHs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """`merge` in plain PyTorch. Shapes and dtypes as there; the inputs are not checked."""
    dtype = outs_BsHD[0].dtype
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    lses_NBHs = torch.stack([lse.to(accumulate) for lse in lses_BHs])
    # A finite stand-in where no partial has keys: -inf - -inf would be NaN.
    highest_BHs = lses_NBHs.amax(0).masked_fill(lses_NBHs.amax(0) == -torch.inf, 0.0)
    exps_NBHs = (lses_NBHs - highest_BHs).exp()
    total_BHs = exps_NBHs.sum(0)
    lse_BHs = highest_BHs + total_BHs.log()
    # exp(lse_i - lse) as a quotient: the rounding of lse, large where |lse| is, stays out of the weights.
    weights_NBHs = exps_NBHs / total_BHs.masked_fill(total_BHs == 0, 1.0)

    out_BsHD = torch.zeros(outs_BsHD[0].shape, dtype=accumulate, device=outs_BsHD[0].device)
    for partial_BsHD, partial_lse_BHs, weight_BHs in zip(outs_BsHD, lses_BHs, weights_NBHs, strict=True):
        # What a kernel writes for a query without keys is its own business (0, or NaN from 0/0), and 0 * NaN is NaN.
        empty_BsH1 = (partial_lse_BHs == -torch.inf).transpose(1, 2).unsqueeze(-1)
        out_BsHD += weight_BHs.transpose(1, 2).unsqueeze(-1) * partial_BsHD.to(accumulate).masked_fill(empty_BsH1, 0.0)
    return out_BsHD.to(dtype), lse_BHs.contiguous()


@fused_or_triton("slimpipe.kernels.triton.merge")
def _merge_into(outs_BsHD: list[Tensor], lses_BHs: list[Tensor], out_BsHD: Tensor) -> Tensor:
    """`merge_reference` into a given output: what a compiled function returns has the strides its compiler likes."""
    merged_BsHD, lse_BHs = merge_reference(outs_BsHD, lses_BHs)
    out_BsHD.copy_(merged_BsHD)
    return lse_BHs


@functools.cache
def extension_available() -> bool:
    """Whether the C++ operators of csrc/ (slimpipe/_C.so) were built and load into this process. Loads them."""
    if hasattr(torch.ops.slimpipe, "merge_lse"):
        return True
    library = Path(__file__).resolve().parent.parent / "_C.so"
    if not library.exists():
        return False
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        warnings.warn(
            f"{library} does not load with torch {torch.__version__} ({error}); using the PyTorch fallbacks. "
            "Build it again: pip install --no-build-isolation -e .",
            stacklevel=2,
        )
        return False
    return hasattr(torch.ops.slimpipe, "merge_lse")


def _check(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    if not outs or len(outs) != len(lses):
        raise ValueError(f"merge: {len(outs)} outs and {len(lses)} lses; needs as many of each, and at least one")
    first = outs[0]
    if first.dim() != 4:
        raise ValueError(f"merge: outs must be [b, s, h, d], got {list(first.shape)}")
    if first.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        raise ValueError(f"merge: outs are {first.dtype}; supported are float32, float64 and bfloat16")
    b, s, h, _ = first.shape
    lse_dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.shape != first.shape or out.dtype != first.dtype or out.device != first.device:
            raise ValueError(
                f"merge: out {i} is {out.dtype} {list(out.shape)} on {out.device}, "
                f"out 0 is {first.dtype} {list(first.shape)} on {first.device}"
            )
        if lse.shape != (b, h, s) or lse.dtype != lse_dtype or lse.device != first.device:
            raise ValueError(
                f"merge: lse {i} is {lse.dtype} {list(lse.shape)} on {lse.device}, "
                f"expected {lse_dtype} {[b, h, s]} on {first.device}"
            )
        if torch.is_grad_enabled() and (out.requires_grad or lse.requires_grad):
            raise RuntimeError(f"merge: partial {i} requires a gradient, which would be lost; call it under no_grad")
