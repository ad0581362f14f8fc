"""The benchmark's Llama in plain PyTorch, for the peers that bring no model of their own.

Weights have slimpipe's names, shapes and first values (`model.init_std`, the run's seed and the parameter's name decide
them), so every system starts from the same model. Letters: b sequences, s tokens, H hidden, h query heads, g key-value
heads, d head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from slimpipe.config import Config
from slimpipe.kernels.rope import inverse_frequencies
from slimpipe.models.contract import initialise
from slimpipe.runtime.stage import generator

RECOMPUTE = ("none", "mlp", "all_but_attention", "full")
"""What a block's backward makes again: nothing; its feed-forward half; all but attention's outcome; all."""
CHUNK = 8192
"""Tokens whose logits are in memory at a time."""
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention: q [b, h, s, d], k and v [b, g, s, d] -> [b, h, s, d]."""


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """By SDPA, which is looked up at each call: torch's context parallelism replaces it there."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def attend_expanded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same with keys and values repeated, where a kernel takes no fewer heads of them."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    def __init__(self, config: Config, attend: Attend) -> None:
        super().__init__()
        model = config.model
        self.heads, self.d, self.attend = (model.heads, model.kv_heads, model.kv_heads), model.head_dim, attend
        self.qkv = nn.Linear(model.hidden_size, sum(self.heads) * self.d, bias=False)
        self.output = nn.Linear(model.heads * self.d, model.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.d)).transpose(1, 2).split(self.heads, dim=1)
        out = self.attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.output(out.transpose(1, 2).flatten(2))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE; x [b, heads, s, d], cos and sin [s, d / 2] fp32."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class FeedForward(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        model = config.model
        self.gate_up = nn.Linear(model.hidden_size, 2 * model.intermediate_size, bias=False)
        self.down = nn.Linear(model.intermediate_size, model.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config: Config, recompute: str, attend: Attend) -> None:
        super().__init__()
        model = config.model
        self.attention_norm = nn.RMSNorm(model.hidden_size, model.norm_eps)
        self.attention = Attention(config, attend)
        self.mlp_norm = nn.RMSNorm(model.hidden_size, model.norm_eps)
        self.mlp = FeedForward(config)
        self.recompute = recompute

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.recompute == "full":
            return checkpoint(self._whole, x, cos, sin, use_reentrant=False)
        if self.recompute == "all_but_attention":
            contexts = partial(create_selective_checkpoint_contexts, keep_attention)
            return checkpoint(self._whole, x, cos, sin, use_reentrant=False, context_fn=contexts)
        return self._whole(x, cos, sin)

    def _whole(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        if self.recompute == "mlp":
            return x + checkpoint(self._half, x, use_reentrant=False)
        return x + self._half(x)

    def _half(self, x: Tensor) -> Tensor:
        return self.mlp(self.mlp_norm(x))


_ATTENTION = ("cudnn_attention", "flash_attention", "flash_attention_for_cpu")


def keep_attention(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Of a selective checkpoint: what attention gave is kept, everything else made again."""
    kept = operator in {getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default for name in _ATTENTION}
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class Embedding(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.model.vocab_size, config.model.hidden_size))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class Head(nn.Module):
    """Final norm, and the loss behind the output layer."""

    def __init__(self, config: Config, compiled: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.model.hidden_size, config.model.norm_eps)
        self.weight = nn.Parameter(torch.empty(config.model.vocab_size, config.model.hidden_size))
        self._loss = torch.compile(cross_entropy) if compiled else cross_entropy

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Sum of the cross-entropies; x [b, s, H], labels [b, s]. Logits are made again in the backward, by chunks."""
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        rows, targets = self.norm(x).flatten(0, 1).split(CHUNK), labels.flatten().split(CHUNK)
        for hidden, target in zip(rows, targets, strict=True):
            total = total + checkpoint(self._loss, hidden, self.weight, target, use_reentrant=False)
        return total


def cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), target, reduction="sum")


class Part(nn.Module):
    """Some layers of the model; the first part has the embedding, the last one the head. Parameters are on `device`.

    forward(x): tokens [b, s] of the first part, else hidden [b, s, H]; gives hidden [b, s, H]. The loss is
    `part.head(hidden, labels)`. `positions` [s]: where not those of whole sequences.
    """

    def __init__(
        self,
        config: Config,
        layers: Sequence[int],
        device: torch.device,
        dtype: torch.dtype,
        recompute: str = "none",
        compiled: bool = False,
        attend: Attend = attend,
    ) -> None:
        super().__init__()
        if recompute not in RECOMPUTE:
            raise ValueError(f"recompute = {recompute}: a peer of plain torch has {', '.join(RECOMPUTE)}")
        first, last = 0 in layers, config.model.layers - 1 in layers
        self.config = config
        with torch.device("meta"):
            self.embedding = Embedding(config) if first else None
            # Keys are the layers' places in the whole model, which the names of their weights carry.
            self.layers = nn.ModuleDict({str(layer): Block(config, recompute, attend) for layer in layers})
            self.head = Head(config, compiled) if last else None
        self.to_empty(device=device).to(dtype)
        for name, parameter in self.named_parameters():
            random = generator(config.train.seed, name, device)
            initialise(self, name, parameter.data, config.model.init_std, random)
        if compiled:
            for layer in self.layers.values():
                # Not layer.compile(), which would take in the hooks that sharding puts around a layer.
                layer.forward = torch.compile(layer.forward)  # type: ignore[method-assign]

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        model = self.config.model
        frequencies = inverse_frequencies(model.head_dim, model.rope_theta, None, positions.device)
        angles = positions.float()[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x, cos, sin)
        return x
