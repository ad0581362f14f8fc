"""cuDNN attention through ATen: the default on a GPU. Its backward is not deterministic (docs/h200.md)."""

from __future__ import annotations

import torch
from torch import Tensor


class CudnnAttention:
    """bf16 or fp16 on Hopper and newer; grouped-query heads unexpanded; strided keys and values."""

    name = "cudnn"
    bottom_right = False

    def __init__(self) -> None:
        self._unused: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, True, 0.0, causal
        )
        return out.transpose(1, 2), lse.squeeze(-1)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        # ATen caches the cuDNN graph by the strides of q, k and v alone: an out of other strides than the first one's
        # would be misread, silently (docs/log.md, 2026-11-29). So it always gets this one layout.
        out, dout = out.contiguous(), dout.contiguous()
        # No dropout: the Philox state is read by nothing.
        if self._unused is None or self._unused.device != q.device:
            self._unused = torch.empty((), dtype=torch.int64, device=q.device)
        seed = offset = self._unused
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            dout.transpose(1, 2),
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            out.transpose(1, 2),
            lse.unsqueeze(-1),
            seed,
            offset,
            None,
            None,
            None,
            q.shape[1],
            k.shape[1],
            0.0,
            causal,
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
