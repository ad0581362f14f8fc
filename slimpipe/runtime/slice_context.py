"""What the engine hands to a block with each slice: its place in the sequence and attention over its prefix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from slimpipe.kernels.attention import AttentionBackend
from slimpipe.runtime.exchange import LayerExchange
from slimpipe.runtime.kv_slots import LayerSlots, SlicePlace
from slimpipe.runtime.sliced_attention import (
    Exchanges,
    LayerAttention,
    attention_again,
    attention_to_keep,
    sliced_attention,
)

T = TypeVar("T")


class AttentionShapes(NamedTuple):
    """What one layer's attention is given of a slice: shapes of q [b, s, heads, d], of k and v [b, s, kv_heads, d]; and
    the dtypes of the three."""

    query: torch.Size
    keys: torch.Size
    values: torch.Size
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]

    @property
    def alike(self) -> bool:
        """Whether values are shaped as keys, and all three are of one dtype."""
        return self.values == self.keys and len(set(self.dtypes)) == 1

    def __str__(self) -> str:
        shapes = (self.query, self.keys, self.values)
        parts = zip("qkv", self.dtypes, shapes, strict=True)
        return ", ".join(f"{name} {str(dtype).removeprefix('torch.')} {list(shape)}" for name, dtype, shape in parts)


def _send_keys(exchange: LayerExchange, index: int, slots: LayerSlots, place: SlicePlace, gradient: Tensor) -> None:
    slots.enter(place, backward=True)
    exchange.send_keys(index, slots)


class SliceContext:
    """Implements `slimpipe.models.contract.Slice` for one unit."""

    again = False

    def __init__(
        self,
        positions: Tensor,
        place: SlicePlace,
        slots: Mapping[int, LayerSlots],
        backend: AttentionBackend,
        exchanges: Exchanges | None = None,
    ) -> None:
        self.positions = positions
        self._place, self._slots, self._backend = place, slots, backend
        self._exchanges = exchanges or Exchanges()
        self.attended: dict[int, AttentionShapes] = {}
        """By layer that has called `attend`."""
        self._first = min(slots)
        self._memo: dict[str, Any] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._meet(layer, q, k, v)
        return sliced_attention(q, k, v, self._slots[layer], self._place, self._backend, self._exchanges)

    def attend_to_keep(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """`attend` in a block's first run: (out, LSE)."""
        self._meet(layer, q, k, v)
        return attention_to_keep(q, k, v, self._attention(layer))

    def attend_again(self, layer: int, q: Tensor, k: Tensor, v: Tensor, known: tuple[Tensor, Tensor] | None) -> Tensor:
        """`attend` in a block's second run; `known` are (out, LSE) of the first."""
        return attention_again(q, k, v, self._attention(layer), known)

    def _attention(self, layer: int) -> LayerAttention:
        return LayerAttention(self._slots[layer], self._place, self._backend, self._exchanges)

    def _meet(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        if layer not in self._slots:
            held = ", ".join(map(str, self._slots))
            raise ValueError(
                f"model.name: slice.attend(layer={layer}): not a layer of this chunk ({held}); pass the block's own "
                "index"
            )
        if layer in self.attended:
            raise ValueError(
                f"model.name: slice.attend(layer={layer}): called twice for one slice; a layer has one set of keys"
            )
        self.attended[layer] = AttentionShapes(q.shape, k.shape, v.shape, (q.dtype, k.dtype, v.dtype))

    def enter_layer(self, layer: int) -> None:
        """Before a block: lent keys and values leave now, ahead of the block's norm and projection."""
        if self._exchanges.forward is not None:
            self._slots[layer].enter(self._place, backward=False)
            self._exchanges.forward.send_keys(layer - self._first, self._slots[layer])

    def leave_layer(self, layer: int, x: Tensor) -> None:
        """Behind a block, with its output: in the backward its gradient is the first to come, and keys leave then."""
        if self._exchanges.forward is not None and layer not in self.attended:
            raise ValueError(f"layer {layer} did not call slice.attend, which pipeline.exchange needs; set it to off")
        exchange, index, slots = self._exchanges.backward, layer - self._first, self._slots[layer]
        if exchange is not None and x.requires_grad:
            # Binds no more than it needs: the hook lives as long as the unit's graph.
            x.register_hook(partial(_send_keys, exchange, index, slots, self._place))

    def memo(self, key: str, make: Callable[[], T]) -> T:
        if key not in self._memo:
            self._memo[key] = make()
        found: T = self._memo[key]
        return found
