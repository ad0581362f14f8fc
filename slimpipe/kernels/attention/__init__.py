"""Attention backends behind one contract, `AttentionBackend`; `select_backend` picks one by name or by device.

A backend never sees the whole sequence: it computes one block of it, (a) a slice against itself, causal, or (b) a slice
against earlier ones, no mask; some take both as one. Partial results carry their log-sum-exp (LSE) and merge exactly
(docs/attention.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from slimpipe.kernels.attention.base import AttentionBackend
from slimpipe.kernels.attention.cudnn import CudnnAttention
from slimpipe.kernels.attention.flash import FlashAttention
from slimpipe.kernels.attention.flash_package import PACKAGES, is_installed, load_package
from slimpipe.kernels.attention.pieces import InPieces
from slimpipe.kernels.attention.plain import PlainAttention

__all__ = [
    "AttentionBackend",
    "CudnnAttention",
    "FlashAttention",
    "PlainAttention",
    "candidates",
    "expected_backend",
    "joins_past",
    "select_backend",
]

_DETERMINISTIC = ("plain", "flash")


def select_backend(name: str, device: torch.device, dtype: torch.dtype, deterministic: bool) -> AttentionBackend:
    """The backend called `name` (auto, plain, flash, cudnn, flash2, flash3, flash4) for this device and dtype.

    `auto` is plain on the CPU and for fp32, and on a GPU cuDNN, or ATen flash where `deterministic` is asked for
    (cuDNN's backward is not); a run measures instead (`slimpipe.train.attention`). Raises ValueError, naming
    `train.attention`, where the named backend cannot run.
    """
    half_on_gpu = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if name == "auto":
        name = ("flash" if deterministic else "cudnn") if half_on_gpu else "plain"
    if name == "plain":
        return PlainAttention()
    if name not in ("flash", "cudnn", *PACKAGES):
        raise ValueError(f"train.attention = {name}: must be auto, plain, flash, cudnn or {' or '.join(PACKAGES)}")
    if not half_on_gpu:
        raise ValueError(f"train.attention = {name}: needs a GPU and bfloat16; here {device.type}, {dtype}; use plain")
    if deterministic and name not in _DETERMINISTIC:
        raise ValueError(
            f"train.attention = {name}: its backward is not deterministic; use flash or train.deterministic = false"
        )
    return _make(name)


def candidates(device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[], AttentionBackend]]:
    """What can be tried for tensors of this device and dtype, by name."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return {"plain": PlainAttention}
    names = ["cudnn", "flash", *(name for name in PACKAGES if is_installed(name))]
    return {name: functools.partial(_make, name) for name in names}


def _make(name: str) -> AttentionBackend:
    if name == "flash":
        return InPieces(FlashAttention())
    return InPieces(CudnnAttention() if name == "cudnn" else load_package(name))


def joins_past(name: str) -> bool:
    """Whether backend `name` takes a slice and the past in front of it as one block (`bottom_right`)."""
    return name in PACKAGES


def expected_backend(name: str, device_type: str, bf16: bool, deterministic: bool) -> str:
    """The backend's name before anything is measured: `train.attention`, and for `auto` the one that takes the most
    memory of those it may be."""
    if name != "auto":
        return name
    if device_type != "cuda" or not bf16:
        return "plain"
    return "flash" if deterministic else "cudnn"
