"""The contract of an attention backend."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class AttentionBackend(Protocol):
    """One block of attention, softmax(q k^T / sqrt(d)) v, and its backward.

    Shapes: q, out, dout [b, s, heads, d]; k, v [b, t, kv_heads, d] with heads a multiple of kv_heads, unexpanded,
    strided views of a larger buffer allowed; lse [b, heads, s] fp32. `causal` needs s = t and masks the upper
    triangle; with `bottom_right` it takes t >= s too: the last s keys are the query's own, and all before are seen.
    """

    name: str

    @property
    def bottom_right(self) -> bool:
        """Whether a slice and the past that lies in front of it can be one causal block."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """(out, lse) of this block alone."""
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of this block, given the out and lse merged over ALL blocks of the query.

        With the merged lse, exp(score - lse) is the block's share of the whole softmax, and the merged out gives the
        whole row's sum of dout * out: both are what the full backward uses, so the parts of dq add up exactly.
        """
        ...
