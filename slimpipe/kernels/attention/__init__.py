"""Attention backends behind one contract, `AttentionBackend`; `select_backend` picks one by name or by device.

A backend never sees the whole sequence: it computes one block of it, (a) a slice against itself, causal, or (b) a slice
against earlier ones, no mask. Partial results carry their log-sum-exp (LSE) and merge exactly (DESIGN.md section 3).
"""

from __future__ import annotations

import torch

from slimpipe.kernels.attention.base import AttentionBackend
from slimpipe.kernels.attention.cudnn import CudnnAttention
from slimpipe.kernels.attention.flash import FlashAttention
from slimpipe.kernels.attention.plain import PlainAttention

__all__ = ["AttentionBackend", "CudnnAttention", "FlashAttention", "PlainAttention", "select_backend"]


def select_backend(name: str, device: torch.device, dtype: torch.dtype, deterministic: bool) -> AttentionBackend:
    """The backend called `name` (auto, plain, flash, cudnn) for tensors of this device and dtype.

    `auto` is plain on the CPU and for fp32, and on a GPU cuDNN, or ATen flash where `deterministic` is asked for
    (cuDNN's backward is not). Raises ValueError, naming `train.attention`, where the named backend cannot run.
    """
    half_on_gpu = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if name == "auto":
        name = ("flash" if deterministic else "cudnn") if half_on_gpu else "plain"
    if name == "plain":
        return PlainAttention()
    if not half_on_gpu:
        raise ValueError(f"train.attention = {name}: needs a GPU and bfloat16; here {device.type}, {dtype}; use plain")
    if name == "flash":
        return FlashAttention()
    if name == "cudnn" and not deterministic:
        return CudnnAttention()
    if name == "cudnn":
        raise ValueError(
            "train.attention = cudnn: its backward is not deterministic; use flash or train.deterministic = false"
        )
    raise ValueError(f"train.attention = {name}: must be auto, plain, flash or cudnn")
