"""Floating-point operations of a model, as MFU counts them: forward once, backward twice, recomputation never."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slimpipe.config.sections import ModelConfig


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
