"""Rotary position embedding at absolute positions (a slice does not start at 0)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from slimpipe.kernels.fuse import fused, upcast


def inverse_frequencies(head_dim: int, theta: float, scaling: dict[str, Any] | None, device: torch.device) -> Tensor:
    """Frequencies theta^(-2i/d), [head_dim / 2] fp32, with the scaling that `model.rope_scaling` asks for.

    `linear` divides every frequency by `factor`. `llama3` (the Llama 3.1 release) divides those whose wavelength is
    longer than original_max_position / low_freq_factor, keeps those shorter than original_max_position /
    high_freq_factor and interpolates between. Raises ValueError for another type.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = theta**-exponent
    if scaling is None:
        return frequencies
    kind, factor = scaling["type"], float(scaling["factor"])
    if kind == "linear":
        return frequencies / factor
    if kind == "llama3":
        low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
        turns = scaling["original_max_position"] * frequencies / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return frequencies * (keep + (1 - keep) / factor)
    raise ValueError(f"model.rope_scaling.type = {kind}: must be linear or llama3")


def rope_table(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """positions [s] -> (cos, sin), each [s, 1, head_dim / 2] in fp32, to broadcast over heads."""
    angles = positions.to(torch.float32)[:, None, None] * frequencies
    return angles.cos(), angles.sin()


@fused
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [.., s, heads, d]: the pairs (x_i, x_{i + d/2}) turned by their angles; in fp32, rounded once."""
    first, second = upcast(x).chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return rotate(g, cos, -sin), None, None


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [b, s, heads, d], (cos, sin) from `rope_table` -> [b, s, heads, d]. Its backward keeps no x."""
    return _Rope.apply(x, cos, sin)
