"""Bytes by formula: what a layer keeps for its backward, and what a pipeline rank therefore holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slimpipe.schedule import Shape

if TYPE_CHECKING:
    from slimpipe.config import Config
    from slimpipe.config.sections import ModelConfig, Recompute


def layer_bytes_per_token(model: ModelConfig, recompute: Recompute, element: int = 2) -> dict[str, int]:
    """What one Llama layer keeps of one token, by tensor, in bytes (docs/recompute.md; `element` bytes a number, 2
    for bf16).

    K and V lie in the KV slots and are counted here. Statistics are fp32 (fp64 where `element` is 8).
    """
    hidden, inner = model.hidden_size * element, model.intermediate_size * element
    q_width = model.heads * model.head_dim * element
    kv_width = model.kv_heads * model.head_dim * element
    statistic = max(4, element)
    kept = {"input": hidden, "k, v": 2 * kv_width}
    if recompute == "full":
        return kept
    kept |= {"attention output": q_width, "log-sum-exp": statistic * model.heads}
    if recompute == "all_but_attention":
        return kept
    kept |= {"q": q_width, "attention residual": hidden, "attention norm's statistics": statistic}
    if model.qk_norm:
        # Views of one tensor, which holds the values too.
        kept["q, k, v before the norms"] = q_width + 2 * kv_width
        kept["q, k norms' statistics"] = statistic * (model.heads + model.kv_heads)
    if recompute == "mlp":
        return kept
    kept |= {"gate, up": 2 * inner, "feed-forward norm's statistics": statistic}
    if recompute == "none":
        kept |= {"norm outputs": 2 * hidden, "SwiGLU product": inner}
    return kept


def small_tensor_bytes(model: ModelConfig, recompute: Recompute, tokens: int, limit: int, element: int = 2) -> int:
    """Of what a layer keeps of `tokens` tokens, the bytes in tensors of at most `limit` bytes: allocators keep small
    tensors apart."""
    sizes = [kept * tokens for kept in layer_bytes_per_token(model, recompute, element).values()]
    return sum(size for size in sizes if size <= limit)


def microbatch_bytes(model: ModelConfig, recompute: Recompute, tokens: int, element: int = 2) -> int:
    """M_a: activations of one microbatch over all layers, K and V included; `tokens` = S x micro_batch."""
    return tokens * model.layers * sum(layer_bytes_per_token(model, recompute, element).values())


def kv_gradient_bytes(model: ModelConfig, shape: Shape, slots: int, layers: int, tokens: int) -> int:
    """fp32 dK, dV beside a rank's KV slots; `slots` and `layers` of one chunk. None are kept where n = 1."""
    if shape.n == 1:
        return 0
    return 2 * 4 * model.kv_heads * model.head_dim * slots * layers * tokens // shape.n


def output_chunk(config: Config, free: int | None) -> int:
    """Tokens a chunk of the output layer: `train.ce_chunk`, or a slice's, halved until a chunk takes a fiftieth of the
    `free` memory of the device (None: the CPU, where 1024 do).

    A token costs its logits in the compute dtype and, at worst, twice in fp32.
    """
    if config.train.ce_chunk is not None:
        return config.train.ce_chunk
    chunk = config.data.sequence_length // config.shape.n * config.train.micro_batch
    if free is None:
        return min(chunk, 1024)
    columns = -(-config.model.vocab_size // (config.parallel.pp if config.vocab_parallel else 1))
    while chunk > 256 and chunk % 2 == 0 and chunk * 10 * columns > free // 50:
        chunk //= 2
    return chunk
