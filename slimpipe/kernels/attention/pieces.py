"""Backwards over many keys in pieces: what a kernel takes beside its results grows with the keys.

Where several query heads share a key head, a kernel's dK and dV come by query head, in the compute dtype, before they
are summed (cuDNN 9.19, FlashAttention-2), or by key head in fp32 (versions 3 and 4). At the Llama-8B shape that is 16
or 8 KiB a key: 7.9 GiB for a slice of 8K with a past of 512K, in one call of cuDNN's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from slimpipe.kernels.attention.base import AttentionBackend
from slimpipe.kernels.fuse import upcast

MOST_BYTES: Final = 2**30
"""Of such gradients in one call."""
STEP: Final = 1024
"""Pieces are a multiple of so many keys long."""
_BY_QUERY_HEAD: Final = ("cudnn", "flash", "flash2")
_MULTIPROCESSORS: Final = 132
"""Of an H100 or H200."""


def bytes_per_key(name: str, heads: int, kv_heads: int, width: int, element: int) -> int:
    """What backend `name` takes in a backward for each key beside dK and dV; heads of `width` numbers, `element` bytes
    each."""
    if name == "plain" or heads == kv_heads:
        return 0
    return 2 * width * (heads * element if name in _BY_QUERY_HEAD else kv_heads * 4)


def most_keys(per_key: int) -> int | None:
    """Keys of one call, where `per_key` bytes each count. None: any number."""
    return max(STEP, MOST_BYTES // per_key // STEP * STEP) if per_key else None


def sums_of_dq(name: str, heads: int, batch: int, deterministic: bool) -> int:
    """How many dQ in fp32 a backward adds up. FlashAttention-2 has one a thread block of those that share a head where
    it must be deterministic, 5 of 32 heads."""
    return -(-_MULTIPROCESSORS // (batch * heads)) if name == "flash" and deterministic else 1


def scratch_bytes(
    name: str,
    queries: int,
    keys: int,
    heads: int,
    kv_heads: int,
    width: int,
    element: int = 2,
    batch: int = 1,
    deterministic: bool = False,
    joined: int = 0,
) -> int:
    """What the backwards of `queries` over themselves and up to `keys` others take beside their results, in calls of
    `InPieces`: the gradients above, and dQ in fp32; where keys are cut also dK and dV of one piece, and the sum of dQ.
    `joined`: keys of the longest causal block of the queries and the past in front of them. Of `plain` nothing is
    counted."""
    if name == "plain":
        return 0
    per_key = batch * bytes_per_key(name, heads, kv_heads, width, element)
    most, dq = most_keys(per_key), 4 * batch * queries * heads * width

    def of_block(length: int, uncut: int) -> int:
        if most is None or length <= max(most, uncut):
            return per_key * length
        return (per_key + 2 * batch * kv_heads * width * element) * max(most, uncut) + dq

    # The queries' own keys are in one piece.
    found = max(of_block(queries, queries), of_block(joined, queries), of_block(keys, 0))
    return found + sums_of_dq(name, heads, batch, deterministic) * dq


class InPieces:
    """A backend whose backwards take so many keys at once that the scratch stays under `MOST_BYTES`. The parts of dQ
    are summed in fp32 and rounded once more."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend, self.name, self.bottom_right = backend, backend.name, backend.bottom_right

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        return self._backend.forward(q, k, v, causal)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, queries, heads, width = q.shape
        keys = k.shape[1]
        most = most_keys(batch * bytes_per_key(self.name, heads, k.shape[2], width, q.element_size()))
        if most is None or keys <= max(most, queries if causal else 0):
            return self._backend.backward(dout, q, k, v, out, lse, causal)
        # Filled piece by piece: joined at the end, all pieces would be there twice.
        dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
        total: Tensor | None = None
        for start, stop in pieces(keys, queries, most, causal):
            part = slice(start, stop)
            last = causal and stop == keys
            dq, dk_part, dv_part = self._backend.backward(dout, q, k[:, part], v[:, part], out, lse, last)
            dk[:, part].copy_(dk_part)
            dv[:, part].copy_(dv_part)
            total = upcast(dq) if total is None else total.add_(dq)
            del dq, dk_part, dv_part  # before the next piece's are made
        assert total is not None
        return total.to(q.dtype), dk, dv


def pieces(keys: int, queries: int, most: int, causal: bool) -> Iterator[tuple[int, int]]:
    """Ranges that cover `keys`, none longer than `most`. Causal: the last holds the queries' own keys, which are the
    last ones, and may be as long as those."""
    tail = keys - max(queries, most) if causal else keys
    yield from ((start, min(start + most, tail)) for start in range(0, tail, most))
    if causal:
        yield tail, keys
