"""Building blocks for models: parameters in modules, mathematics in `slimpipe.kernels`.

They hold fp32-accumulating weight gradients and what `memory.recompute` says of them. Plain torch.nn modules work in a
model too; they take one more pass over each weight gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from slimpipe.kernels.embedding import embedding
from slimpipe.kernels.linear import linear
from slimpipe.kernels.mlp import add_norm_swiglu
from slimpipe.kernels.norm import add_norm_linear, norm_linear, rms_norm
from slimpipe.kernels.swiglu import swiglu_linear
from slimpipe.kernels.twice import recomputed as recomputed

if TYPE_CHECKING:
    from slimpipe.config import Recompute


class Linear(nn.Module):
    """y = x W^T, weight [out, in], no bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, weight [H]."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Embedding(nn.Module):
    """tokens [b, s] -> [b, s, H], weight [V, H]."""

    def __init__(self, vocabulary: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, size))

    def forward(self, tokens: Tensor) -> Tensor:
        return embedding(tokens, self.weight)


class Head(nn.Module):
    """Final norm, and the output projection `weight` [V, H] for the loss. `tie_to` shares an embedding's weight."""

    def __init__(self, vocabulary: int, size: int, eps: float, tie_to: Embedding | None) -> None:
        super().__init__()
        self.norm = RMSNorm(size, eps)
        self.weight = nn.Parameter(torch.empty(vocabulary, size)) if tie_to is None else tie_to.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def project_normed(x: Tensor, norm: RMSNorm, projection: Linear, recompute: bool, rows: int | None = None) -> Tensor:
    """projection(norm(x)); with `recompute` the normalised x is not kept for the backward. `rows`: see norm_linear."""
    return norm_linear(x, norm.weight, projection.weight, norm.eps, recompute, rows)


def project_residual(
    x: Tensor, delta: Tensor | None, norm: RMSNorm, projection: Linear, recompute: bool, rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """(projection(norm(h)), h): h = x + delta, or x, is the residual stream, which goes on. In fewer passes over memory
    than addition and norm apart, backward too. h must not be changed in place."""
    return add_norm_linear(x, delta, norm.weight, projection.weight, norm.eps, recompute, rows)


class SwiGLU(nn.Module):
    """down(silu(gate) * up) behind a norm: gate and up are one GEMM, weight [2 I, H] with gate's rows first."""

    def __init__(self, size: int, inner: int, recompute: Recompute) -> None:
        super().__init__()
        self.gate_up, self.down, self.recompute = Linear(size, 2 * inner), Linear(inner, size), recompute

    def forward(self, x: Tensor, norm: RMSNorm, again: bool = False) -> Tensor:
        """`again`: the run is for its backward alone (`Slice.again`); the value is zero then."""
        return self.of_residual(x, None, norm, again)[0]

    def of_residual(self, x: Tensor, delta: Tensor | None, norm: RMSNorm, again: bool = False) -> tuple[Tensor, Tensor]:
        """(the value, h), for h = x + delta as in `project_residual`."""
        if self.recompute in ("none", "norms"):
            lean = self.recompute == "norms"
            inner, h = project_residual(x, delta, norm, self.gate_up, lean)
            return swiglu_linear(inner, self.down.weight, lean), h
        weights = norm.weight, self.gate_up.weight, self.down.weight
        return add_norm_swiglu(x, delta, *weights, norm.eps, value=not again)
