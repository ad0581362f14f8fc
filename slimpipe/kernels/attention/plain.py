"""Attention in plain PyTorch, for the CPU and as the reference of the others. Holds the block's [s, t] scores."""

from __future__ import annotations

import torch
from torch import Tensor

from slimpipe.kernels.fuse import upcast


class PlainAttention:
    """Materialises fp32 scores; any device, any dtype, deterministic."""

    name = "plain"
    bottom_right = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        scores_BKGst = self._scores(q, k, causal)
        lse_BKGs = torch.logsumexp(scores_BKGst, -1)
        weights = torch.exp(scores_BKGst - lse_BKGs[..., None])
        out = torch.einsum("bkgst,btkd->bskgd", weights, upcast(v))
        return out.flatten(2, 3).to(q.dtype), lse_BKGs.flatten(1, 2)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        groups = (k.shape[2], q.shape[2] // k.shape[2])
        scale = q.shape[-1] ** -0.5
        q_BsKGD, dout_BsKGD = (upcast(x).unflatten(2, groups) for x in (q, dout))
        weights = torch.exp(self._scores(q, k, causal) - lse.unflatten(1, groups)[..., None])
        row = torch.einsum("bshd,bshd->bhs", upcast(dout), upcast(out)).unflatten(1, groups)
        dweights = torch.einsum("bskgd,btkd->bkgst", dout_BsKGD, upcast(v))
        dscores = weights * (dweights - row[..., None]) * scale
        dq = torch.einsum("bkgst,btkd->bskgd", dscores, upcast(k)).flatten(2, 3)
        dk = torch.einsum("bkgst,bskgd->btkd", dscores, q_BsKGD)
        dv = torch.einsum("bkgst,bskgd->btkd", weights, dout_BsKGD)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    @staticmethod
    def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
        q_BsKGD = upcast(q).unflatten(2, (k.shape[2], q.shape[2] // k.shape[2]))
        scores = torch.einsum("bskgd,btkd->bkgst", q_BsKGD, upcast(k)) * q.shape[-1] ** -0.5
        if causal:
            hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(hidden, float("-inf"))
        return scores
