"""The judge: a plain Llama in one process, unsliced, written without slimpipe's kernels or models.

Attention is `F.scaled_dot_product_attention(is_causal=True)` with keys and values repeated for GQA; everything else is
plain PyTorch under autograd. Letters in names: B sequences, S tokens, H hidden, I intermediate, V vocabulary, h query
heads, g key/value heads, d head width.

Weights go by layout-free names: `embedding.weight` [V,H]; of layer i, under `layers.{i}.`: `attention_norm.weight` [H],
`attention.qkv.weight` [(h+2g)d,H] (all query heads, then all key heads, then all value heads), with QK-norm
`attention.q_norm.weight` and `attention.k_norm.weight` [d], `attention.output.weight` [H,hd], `mlp_norm.weight` [H],
`mlp.gate_up.weight` [2I,H] (gate rows first), `mlp.down.weight` [H,I]; `head.norm.weight` [H]; and `head.weight` [V,H],
absent where the embedding is tied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100


@dataclass(frozen=True)
class RopeScaling:
    """`linear` divides every frequency by `factor`; `llama3` only those of long wavelength, with a ramp between."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192


@dataclass(frozen=True)
class LlamaSpec:
    """All that the reference needs to know of a model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False
    tied: bool = False

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's name and shape."""
        shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (self.vocab, self.hidden)}
        for i in range(self.layers):
            at = f"layers.{i}."
            shapes[at + "attention_norm.weight"] = (self.hidden,)
            shapes[at + "attention.qkv.weight"] = ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden)
            if self.qk_norm:
                shapes[at + "attention.q_norm.weight"] = (self.head_dim,)
                shapes[at + "attention.k_norm.weight"] = (self.head_dim,)
            shapes[at + "attention.output.weight"] = (self.hidden, self.heads * self.head_dim)
            shapes[at + "mlp_norm.weight"] = (self.hidden,)
            shapes[at + "mlp.gate_up.weight"] = (2 * self.intermediate, self.hidden)
            shapes[at + "mlp.down.weight"] = (self.hidden, self.intermediate)
        shapes["head.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["head.weight"] = (self.vocab, self.hidden)
        return shapes


def random_weights(spec: LlamaSpec, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Weights for the harness's own tests: norms around 1, everything else N(0, 0.5 / sqrt(columns))."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in spec.shapes().items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        value = 1 + 0.2 * noise if len(shape) == 1 else noise * 0.5 / math.sqrt(shape[1])
        weights[name] = value.to(dtype)
    return weights


def reference_loss_and_grads(
    spec: LlamaSpec,
    weights: Mapping[str, Tensor],
    tokens_BS: Tensor,
    labels_BS: Tensor,
    dtype: torch.dtype = torch.float32,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean loss over the batch's valid tokens, as a float64 scalar, and the gradient of every weight, in `dtype`.

    `labels_BS[b, t]` is the target of position t (already shifted), or -100 where the position does not count.
    The whole batch is one forward: `dtype=torch.float64` gives the measure against which rounding is judged.
    """
    expected = spec.shapes()
    given = {name: tuple(weight.shape) for name, weight in weights.items()}
    if given != expected:
        wrong = sorted(n for n in given.keys() | expected.keys() if given.get(n) != expected.get(n))
        raise ValueError(f"weights do not fit the spec: {[(n, given.get(n), expected.get(n)) for n in wrong]}")
    leaves = {name: weight.detach().to(dtype).clone().requires_grad_() for name, weight in weights.items()}
    loss = _loss(spec, leaves, tokens_BS, labels_BS, z_loss, label_smoothing)
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return loss.detach().double(), dict(zip(leaves, grads, strict=True))


def _loss(
    spec: LlamaSpec,
    w: Mapping[str, Tensor],
    tokens_BS: Tensor,
    labels_BS: Tensor,
    z_loss: float,
    label_smoothing: float,
) -> Tensor:
    valid = int((labels_BS != IGNORED).sum())
    if valid == 0:
        raise ValueError("no valid token in the batch: the mean loss is undefined")
    x_BSH = F.embedding(tokens_BS, w["embedding.weight"])
    cos_Sd, sin_Sd = rope_tables(spec, tokens_BS.shape[1], x_BSH.dtype)
    for i in range(spec.layers):
        at = f"layers.{i}."
        x_BSH = x_BSH + _attention(spec, w, at, _rms_norm(x_BSH, w[at + "attention_norm.weight"], spec), cos_Sd, sin_Sd)
        gate_up = _rms_norm(x_BSH, w[at + "mlp_norm.weight"], spec) @ w[at + "mlp.gate_up.weight"].T
        gate, up = gate_up.chunk(2, dim=-1)
        x_BSH = x_BSH + (gate * torch.sigmoid(gate) * up) @ w[at + "mlp.down.weight"].T
    head_VH = w["embedding.weight"] if spec.tied else w["head.weight"]
    logits_BSV = _rms_norm(x_BSH, w["head.norm.weight"], spec) @ head_VH.T
    total = F.cross_entropy(
        logits_BSV.flatten(0, 1),
        labels_BS.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    if z_loss:
        total = total + z_loss * logits_BSV.logsumexp(-1)[labels_BS != IGNORED].square().sum()
    return total / valid


def _attention(
    spec: LlamaSpec, w: Mapping[str, Tensor], at: str, x_BSH: Tensor, cos_Sd: Tensor, sin_Sd: Tensor
) -> Tensor:
    B, S, _ = x_BSH.shape
    h, g, d = spec.heads, spec.kv_heads, spec.head_dim
    q, k, v = torch.split(x_BSH @ w[at + "attention.qkv.weight"].T, [h * d, g * d, g * d], dim=-1)
    q_BhSd = q.view(B, S, h, d).transpose(1, 2)
    k_BgSd = k.view(B, S, g, d).transpose(1, 2)
    v_BgSd = v.view(B, S, g, d).transpose(1, 2)
    if spec.qk_norm:
        q_BhSd = _rms_norm(q_BhSd, w[at + "attention.q_norm.weight"], spec)
        k_BgSd = _rms_norm(k_BgSd, w[at + "attention.k_norm.weight"], spec)
    q_BhSd, k_BgSd = _rotate(q_BhSd, cos_Sd, sin_Sd), _rotate(k_BgSd, cos_Sd, sin_Sd)
    k_BhSd, v_BhSd = (t.repeat_interleave(h // g, dim=1) for t in (k_BgSd, v_BgSd))
    out_BhSd = F.scaled_dot_product_attention(q_BhSd, k_BhSd, v_BhSd, is_causal=True)
    return out_BhSd.transpose(1, 2).reshape(B, S, h * d) @ w[at + "attention.output.weight"].T


def _rms_norm(x: Tensor, weight: Tensor, spec: LlamaSpec) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + spec.norm_eps) * weight


def rope_tables(spec: LlamaSpec, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos, sin [length, d/2] of position * frequency, the angles worked out in float64."""
    even = torch.arange(0, spec.head_dim, 2, dtype=torch.float64)
    frequencies = spec.rope_theta ** (-even / spec.head_dim)
    scaling = spec.rope_scaling
    if scaling is not None and scaling.kind == "linear":
        frequencies = frequencies / scaling.factor
    elif scaling is not None:
        # Turns of each frequency over the original length: few turns (long waves) are stretched, many are left alone.
        turns = scaling.original_length * frequencies / (2 * math.pi)
        keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        keep = keep.clamp(0, 1)
        frequencies = keep * frequencies + (1 - keep) * frequencies / scaling.factor
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(x_BhSd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x_BhSd.chunk(2, dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)


def relative_error(value: Tensor, reference: Tensor) -> float:
    """|value - reference| / |reference| in L2, in float64; where the reference is zero, the L2 of the value itself."""
    value, reference = value.double(), reference.double()
    norm = float(reference.norm())
    return float((value - reference).norm()) / (norm if norm > 0 else 1.0)
