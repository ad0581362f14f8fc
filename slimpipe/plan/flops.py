"""Floating-point operations of a model, as MFU counts them: forward once, backward twice, recomputation never."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slimpipe.config.sections import ModelConfig, Recompute


def layer_flops_per_token(model: ModelConfig, sequence_length: int) -> tuple[float, float]:
    """(GEMM, attention) forward operations of one layer for one token, a multiply and an add counted as two.

    Attention is causal, so a token meets (S + 1) / 2 keys on average; the score and the value product each take 2 d a
    key and head.
    """
    q_width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    weights = model.hidden_size * (2 * q_width + 2 * kv_width + 3 * model.intermediate_size)
    return 2.0 * weights, 4.0 * q_width * (sequence_length + 1) / 2


def step_flops(model: ModelConfig, sequence_length: int, sequences: int) -> float:
    """Forward and backward of a whole step, output layer included (the embedding multiplies nothing)."""
    gemm, attention = layer_flops_per_token(model, sequence_length)
    head = 2.0 * model.hidden_size * model.vocab_size
    return 3.0 * sequences * sequence_length * (model.layers * (gemm + attention) + head)


def recomputed_shares(model: ModelConfig, recompute: Recompute) -> tuple[float, bool]:
    """(of the GEMMs, whether the attention) the parts of a layer's forward that its backward does once more.

    slimpipe's own blocks leave out what a second run does not need: the keys and values, where no norm reads them, and
    the down projection. A block of the user's own runs again whole, and `mlp` is its own affair.
    """
    attention = recompute == "full"
    if recompute in ("none", "norms"):
        return 0.0, attention
    if model.name != "llama":
        return (0.0 if recompute == "mlp" else 1.0), attention
    q_width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    again = 2 * model.intermediate_size
    if recompute != "mlp":
        again += 2 * q_width + (2 * kv_width if model.qk_norm else 0)
    return again / (2 * q_width + 2 * kv_width + 3 * model.intermediate_size), attention


def recomputed_flops_per_token(model: ModelConfig, recompute: Recompute, sequence_length: int) -> tuple[float, float]:
    """(GEMM, attention) operations that one layer's backward adds for one token by making the forward's again."""
    forward = layer_flops_per_token(model, sequence_length)
    gemm, attention = recomputed_shares(model, recompute)
    return forward[0] * gemm, forward[1] * attention
