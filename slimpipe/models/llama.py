"""Llama: RMSNorm, RoPE, grouped-query attention, SwiGLU; optional QK-norm, tied or untied embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from slimpipe.kernels.rope import inverse_frequencies, rope, rope_of_heads, rope_table
from slimpipe.models.contract import Slice, leaves_out
from slimpipe.models.layers import Embedding, Head, Linear, RMSNorm, SwiGLU, project_residual

if TYPE_CHECKING:
    from slimpipe.config import Config


class Attention(nn.Module):
    """Self-attention with the norm in front of it. `qkv` holds all query heads, then key heads, then value heads."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        model = config.model
        self.layer, self.settings = layer, model
        self.lean = config.memory.recompute in ("norms", "mlp")
        self.heads = (model.heads, model.kv_heads, model.kv_heads)
        self.qkv = Linear(model.hidden_size, sum(self.heads) * model.head_dim)
        self.output = Linear(model.heads * model.head_dim, model.hidden_size)
        self.q_norm = RMSNorm(model.head_dim, model.norm_eps) if model.qk_norm else None
        self.k_norm = RMSNorm(model.head_dim, model.norm_eps) if model.qk_norm else None
        self._frequencies: Tensor | None = None

    def forward(self, x: Tensor, norm: RMSNorm, slice: Slice) -> tuple[Tensor, Tensor]:
        """x [b, s, H] -> (the value, x for the residual stream)."""
        # Of a second run no key or value is read but by its norm: only queries are computed.
        queries = self.heads[0] * self.settings.head_dim if slice.again and self.k_norm is None else None
        qkv, x = project_residual(x, None, norm, self.qkv, self.lean, queries)
        cos, sin = slice.memo("rope", lambda: self._rope_table(slice.positions))
        if self.q_norm is None or self.k_norm is None:
            q, k, v = rope_of_heads(qkv, cos, sin, self.heads)
        else:
            q, k, v = qkv.unflatten(-1, (-1, self.settings.head_dim)).split(self.heads, dim=2)
            q, k = rope(self.q_norm(q), cos, sin), rope(self.k_norm(k), cos, sin)
        out = slice.attend(self.layer, q, k, v)
        return self.output(out.flatten(2)), x

    def _rope_table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self._frequencies is None or self._frequencies.device != positions.device:
            model = self.settings
            scaling = None if model.rope_scaling is None else dict(model.rope_scaling)
            self._frequencies = inverse_frequencies(model.head_dim, model.rope_theta, scaling, positions.device)
        return rope_table(positions, self._frequencies)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); x [b, s, H]."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        model = config.model
        self.attention_norm = RMSNorm(model.hidden_size, model.norm_eps)
        self.attention = Attention(config, layer)
        self.mlp_norm = RMSNorm(model.hidden_size, model.norm_eps)
        self.mlp = SwiGLU(model.hidden_size, model.intermediate_size, config.memory.recompute)

    @leaves_out
    def forward(self, x: Tensor, slice: Slice) -> Tensor:
        attended, x = self.attention(x, self.attention_norm, slice)
        fed, x = self.mlp.of_residual(x, attended, self.mlp_norm, slice.again)
        return x + fed


class Llama(nn.Module):
    """The contract's three parts: `embedding`, `layers`, `head`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        model = config.model
        self.embedding = Embedding(model.vocab_size, model.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(model.layers))
        tie_to = self.embedding if model.tie_embeddings else None
        self.head = Head(model.vocab_size, model.hidden_size, model.norm_eps, tie_to)
