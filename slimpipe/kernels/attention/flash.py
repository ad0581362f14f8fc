"""ATen's FlashAttention-2: every recent NVIDIA GPU; deterministic under torch.use_deterministic_algorithms."""

from __future__ import annotations

import torch
from torch import Tensor


class FlashAttention:
    """bf16 or fp16; grouped-query heads unexpanded; strided keys and values."""

    name = "flash"
    bottom_right = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False
        )
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        # No dropout: the random state is read by nothing.
        unused = torch.empty(0, dtype=torch.int64, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse, None, None, q.shape[1], k.shape[1], 0.0, causal, unused, unused
        )
        return dq, dk, dv
