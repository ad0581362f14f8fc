"""One layer's keys and values of every slice in flight, in one buffer (docs/architecture.md, "KV slots").

The past of a query has no order once RoPE is applied, so slices lie wherever the plan puts them; the plan sees to it
that a slice's past is one range of slots (two at most). Nothing is appended, copied or freed during a step; where
slots stream (`slimpipe.runtime.kv_streaming`) they are on the device from `enter` to `leave`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slimpipe.kernels.fuse import wide
from slimpipe.kernels.sums import add_pairs, add_rounded


@dataclass(frozen=True)
class SlicePlace:
    """Where a unit's keys and values go, and where those of the slices before it lie."""

    slot: int
    past: tuple[tuple[int, int], ...]
    """Half-open ranges of slots."""
    last: bool
    """Last slice of its sequence: the first of its microbatch to run backward."""


class LayerSlots:
    """k, v [b, slots * s, kv_heads, d] in the compute dtype; dk, dv likewise in fp32 (fp64 for fp64).

    Allocated at the first write, from the shapes seen there. The accumulators need no clearing: the backward of a
    sequence's last slice, which is the first to run, stores into its whole past; later ones add.
    """

    def __init__(self, slots: int, slice_tokens: int, accumulate: bool) -> None:
        self.slots, self.slice_tokens, self.accumulates = slots, slice_tokens, accumulate
        self.k: Tensor | None = None
        self.v: Tensor | None = None
        self.dk: Tensor | None = None
        self.dv: Tensor | None = None
        self._parts: dict[tuple[bool, int, int], tuple[Tensor, Tensor]] = {}
        """Views of the buffers that have been asked for, by kind and positions: a step asks for the same ones again."""

    def enter(self, place: SlicePlace, backward: bool) -> None:
        """Before a slice's forward or backward looks at what the layer holds. May be called again until `leave`."""

    def leave(self) -> None:
        """Behind that."""

    def store(self, place: SlicePlace, k: Tensor, v: Tensor) -> None:
        """Begins a slice's forward (`enter`) and stores its k and v [b, s, kv_heads, d]."""
        if self.k is None:
            self._allocate(k, v)
        self.enter(place, backward=False)
        self.write(place.slot, k, v)

    def write(self, slot: int, k: Tensor, v: Tensor) -> None:
        """Stores one slice, k and v [b, s, kv_heads, d]."""
        if self.k is None:
            self._allocate(k, v)
        own_k, own_v = self.read(*self.positions(slot, slot + 1))
        own_k.copy_(k)
        own_v.copy_(v)

    def _allocate(self, k: Tensor, v: Tensor) -> None:
        length = self.slots * self.slice_tokens
        self.k, self.v = (x.new_empty((x.shape[0], length, *x.shape[2:])) for x in (k, v))
        if self.accumulates:
            self.dk, self.dv = (torch.empty_like(x, dtype=wide(x.dtype)) for x in (self.k, self.v))

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Views of k and v for token positions start .. stop - 1 of the buffer."""
        return self._part(False, start, stop)

    def add_gradient(self, start: int, stop: int, dk: Tensor, dv: Tensor, first: bool) -> None:
        """Adds a later slice's part to the gradients of positions start .. stop - 1; `first` stores instead."""
        accs = self._part(True, start, stop)
        add_pairs((dk, dv), None if first else accs, accs)

    def total_gradient(self, place: SlicePlace, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """A slice's own (causal) part plus what later slices have added, rounded once to the compute dtype.

        Complete when it is read, because backwards come in reverse slice order. A sequence's last slice has no later
        one.
        """
        if place.last:
            # A part of a longer block's gradient keeps that one's strides, even with a batch of one (where this copies
            # nothing), and compiled code is for one set of strides.
            return dk.flatten().view(dk.shape), dv.flatten().view(dv.shape)
        return add_rounded(self._part(True, *self.positions(place.slot, place.slot + 1)), (dk, dv))

    def _part(self, gradients: bool, start: int, stop: int) -> tuple[Tensor, Tensor]:
        key = gradients, start, stop
        found = self._parts.get(key)
        if found is None:
            first, second = (self.dk, self.dv) if gradients else (self.k, self.v)
            assert first is not None and second is not None
            found = self._parts[key] = first[:, start:stop], second[:, start:stop]
        return found

    def forget_parts(self) -> None:
        """To be called where the buffers become other ones."""
        self._parts.clear()

    def positions(self, start: int, stop: int) -> tuple[int, int]:
        """Token positions of slots start .. stop - 1, half-open."""
        return start * self.slice_tokens, stop * self.slice_tokens
