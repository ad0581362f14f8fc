"""Rotary position embedding at absolute positions (a slice does not start at 0)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from slimpipe.kernels.fuse import fused, fused_or_triton, upcast
from slimpipe.kernels.once import once_differentiable


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


@fused_or_triton("slimpipe.kernels.triton.rope")
def rotate_heads(qkv: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """The first two groups of `heads` (queries', keys', values') of qkv [b, s, sum(heads), d], rotated."""
    q, k, _ = qkv.split(heads, 2)
    return rotate.plain(q, cos, sin), rotate.plain(k, cos, sin)


@fused_or_triton("slimpipe.kernels.triton.rope_backward")
def rotate_heads_back(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Gradient of qkv from those of `rotate_heads` and of the values, [b, s, heads, d] each; contiguous."""
    return torch.cat((rotate.plain(dq, cos, -sin), rotate.plain(dk, cos, -sin), dv), 2)


class _RopeOfHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int, int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        qkv = qkv.unflatten(-1, (sum(heads), -1))
        # A tensor of its own, as for a Function's output in `slimpipe.kernels.norm`.
        return *rotate_heads(qkv, cos, sin, heads), qkv.detach()[:, :, heads[0] + heads[1] :]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        return rotate_heads_back(dq, dk, dv, *ctx.saved_tensors).flatten(2), None, None, None


def rope_of_heads(qkv: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [b, s, sum(heads) d], `heads` of queries, keys and values: (`rope` of q, `rope` of k, v), [b, s, heads, d].

    One node of autograd's graph for what splitting and `rope` take four and a sum for. Its backward keeps no qkv.
    """
    return _RopeOfHeads.apply(qkv, cos, sin, heads)
