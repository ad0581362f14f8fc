"""Causal attention of one slice over its whole prefix (docs/architecture.md; SlimPipe section 4.1).

Forward: the slice against itself, causal, and against each range of its past, no mask; the partial results merge by
their log-sum-exp in one fp32 pass. Backward: the backend's backward on the same blocks, given the merged output and
LSE; the past's part of dK, dV goes into the slots' accumulators. A backend whose causal mask lies at the bottom right
takes the slice and the past in front of it in one call. Ranges of the past that are lent (exchange) are other
ranks' to compute: their results come back in time for the merge and for the sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slimpipe.kernels.attention import AttentionBackend
from slimpipe.kernels.merge import merge
from slimpipe.kernels.once import once_differentiable
from slimpipe.kernels.sums import sum_rounded
from slimpipe.runtime.exchange import LayerExchange
from slimpipe.runtime.kv_slots import LayerSlots, SlicePlace
from slimpipe.schedule.lending import Range, without


@dataclass(frozen=True)
class Exchanges:
    """A unit's loans, in the slot of its forward and of its backward. None: the rank neither lends nor helps there."""

    forward: LayerExchange | None = None
    backward: LayerExchange | None = None


class LayerAttention(NamedTuple):
    """One layer's attention of one slice: where keys and values lie, and who computes what."""

    slots: LayerSlots
    place: SlicePlace
    backend: AttentionBackend
    exchanges: Exchanges

    def forward(self, q: Tensor, exchange: LayerExchange | None) -> tuple[Tensor, Tensor]:
        """(out, LSE) over the whole prefix, whose keys and values, the slice's own too, are in the slots."""
        slots, backend = self.slots, self.backend
        under_way = exchange.forward(q) if exchange is not None else None
        own, pasts = self._blocks(exchange)
        parts = [backend.forward(q, *slots.read(*own), causal=True)]
        if under_way is not None:
            under_way.help()
        for past in pasts:
            parts.append(backend.forward(q, *slots.read(*past), causal=False))
        if under_way is not None:
            parts += under_way.collect()
        return merge([part[0] for part in parts], [part[1] for part in parts])

    def backward(self, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of the slice; the past's part of dK, dV goes into the slots' accumulators."""
        slots, place, backend, exchange = self.slots, self.place, self.backend, self.exchanges.backward
        slots.enter(place, backward=True)
        dout = dout.contiguous()
        under_way = exchange.backward((q, out, lse, dout)) if exchange is not None else None
        own, pasts = self._blocks(exchange)
        dq_own, dk, dv = backend.backward(dout, q, *slots.read(*own), out, lse, causal=True)
        dq_parts = [dq_own]
        before = own[1] - own[0] - slots.slice_tokens
        if before:
            slots.add_gradient(own[0], own[0] + before, dk[:, :before], dv[:, :before], first=place.last)
            dk, dv = dk[:, before:], dv[:, before:]
        if under_way is not None:
            under_way.help()
        for past in pasts:
            dq_part, dk_part, dv_part = backend.backward(dout, q, *slots.read(*past), out, lse, causal=False)
            dq_parts.append(dq_part)
            slots.add_gradient(*past, dk_part, dv_part, first=place.last)
        for past, dq_part, dk_part, dv_part in under_way.collect() if under_way is not None else ():
            dq_parts.append(dq_part)
            slots.add_gradient(*past, dk_part, dv_part, first=place.last)
        dk, dv = slots.total_gradient(place, dk, dv)
        slots.leave()
        return sum_rounded(dq_parts), dk, dv

    def _blocks(self, exchange: LayerExchange | None) -> tuple[Range, list[Range]]:
        """Positions of the causal block and of the blocks of the past that this rank computes itself.

        The causal block is the slice alone; of a backend that can, with the stretch of the past that ends where the
        slice begins. What order that stretch is in does not matter, for all of it is seen. A rank that helps keeps the
        two apart: what it computes for others comes between them, so that they have it early.
        """
        start, stop = self.slots.positions(self.place.slot, self.place.slot + 1)
        pasts = self._own_ranges(exchange)
        if self.backend.bottom_right and (exchange is None or not exchange.helped):
            beside = next((past for past in pasts if past[1] == start), None)
            if beside is not None:
                return (beside[0], stop), [past for past in pasts if past != beside]
        return (start, stop), pasts

    def _own_ranges(self, exchange: LayerExchange | None) -> list[Range]:
        """Positions of the past that this rank computes itself."""
        past = [self.slots.positions(*slot_range) for slot_range in self.place.past]
        return past if exchange is None else without(past, [loan.range for loan in exchange.lent])


class _SlicedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layer: LayerAttention) -> Tensor:
        out, lse = attention_to_keep(q, k, v, layer)
        # k and v are not saved: they stay in their slot until this unit's backward has run.
        ctx.save_for_backward(q, out, lse)
        ctx.layer = layer
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.layer.backward(dout, *ctx.saved_tensors), None


class _AttentionAgain(torch.autograd.Function):
    """In the second run of a block: k and v take gradients, and their values are not looked at."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layer: LayerAttention, known: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        if known is None:
            layer.slots.enter(layer.place, backward=True)
            known = layer.forward(q, layer.exchanges.backward)
        out, lse = known
        ctx.save_for_backward(q, out, lse)
        ctx.layer = layer
        return out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.layer.backward(dout, *ctx.saved_tensors), None, None


def sliced_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: LayerSlots,
    place: SlicePlace,
    backend: AttentionBackend,
    exchanges: Exchanges | None = None,
) -> Tensor:
    """Causal attention of a slice over all tokens up to it.

    q [b, s, heads, d], k and v [b, s, kv_heads, d] after RoPE -> [b, s, heads, d]. Writes k and v into `slots` at
    `place.slot`; the past is read from `place.past`. Forwards must come in ascending slice order and backwards in
    descending order, which the plan's checker proves.
    """
    return _SlicedAttention.apply(q, k, v, LayerAttention(slots, place, backend, exchanges or Exchanges()))


def attention_to_keep(q: Tensor, k: Tensor, v: Tensor, layer: LayerAttention) -> tuple[Tensor, Tensor]:
    """`sliced_attention` in a first run, which records no gradients: (out, LSE [b, heads, s]), for the second."""
    layer.slots.store(layer.place, k, v)
    found = layer.forward(q, layer.exchanges.forward)
    layer.slots.leave()
    return found


def attention_again(
    q: Tensor, k: Tensor, v: Tensor, layer: LayerAttention, known: tuple[Tensor, Tensor] | None
) -> Tensor:
    """`sliced_attention` in a second run: the slice's keys and values are in their slot, and nothing is written.

    `known`: (out, LSE) from the first run. None: attention itself runs again, with the loans of the backward's slot.
    """
    return _AttentionAgain.apply(q, k, v, layer, known)
