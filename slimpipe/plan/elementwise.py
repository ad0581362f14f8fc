"""Memory traffic of what is no GEMM and no attention in a layer of slimpipe's Llama: norms, RoPE, SwiGLU, sums.

Each is bound by memory, so its time is its bytes over the memory's bandwidth. Counted as the fused kernels read and
write them, each tensor once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from slimpipe.config.sections import ModelConfig, Recompute


class Traffic(NamedTuple):
    """Bytes read and written for one token in one layer."""

    forward: float
    backward: float


def layer_traffic(model: ModelConfig, recompute: Recompute, n: int, element: int = 2) -> Traffic:
    """`n` slices a sequence: the more, the more often the gradients of earlier keys and values are added up."""
    H, F = model.hidden_size, model.intermediate_size
    Q, K = model.heads * model.head_dim, model.kv_heads * model.head_dim
    norm, added_norm, residual, rope, slots = 2 * H, 4 * H, 3 * H, 2 * (Q + K), 4 * K
    merge = 3 * Q if n > 1 else 0
    swiglu = 3 * F
    forward = element * (norm + added_norm + residual + rope + slots + merge + swiglu)
    # Norm: reads input, gradient and the residual's gradient, writes; SwiGLU: reads three, writes two.
    backward: float = element * (2 * 4 * H + rope + 5 * F)
    # Of every earlier slice, on average (n - 1) / 2 of them: dK, dV read in `element`, added into fp32.
    backward += 2 * K * (element + 8) * (n - 1) / 2
    again = {"none": 0, "norms": 2 * norm + swiglu}.get(recompute, 2 * norm + swiglu + residual)
    if recompute in ("all_but_attention", "full"):
        again += rope + residual + (merge if recompute == "full" else 0)
    return Traffic(forward, backward + element * again)
