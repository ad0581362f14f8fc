"""What the engine hands to a block with each slice: its place in the sequence and attention over its prefix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from slimpipe.kernels.attention import AttentionBackend
from slimpipe.runtime.kv_slots import LayerSlots, SlicePlace
from slimpipe.runtime.sliced_attention import sliced_attention

T = TypeVar("T")


class SliceContext:
    """Implements `slimpipe.models.contract.Slice` for one unit."""

    def __init__(
        self, positions: Tensor, place: SlicePlace, slots: Mapping[int, LayerSlots], backend: AttentionBackend
    ) -> None:
        self.positions = positions
        self._place, self._slots, self._backend = place, slots, backend
        self._memo: dict[str, Any] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer not in self._slots:
            held = ", ".join(map(str, self._slots))
            raise ValueError(
                f"slice.attend(layer={layer}): not a layer of this chunk ({held}); pass the block's own index"
            )
        return sliced_attention(q, k, v, self._slots[layer], self._place, self._backend)

    def memo(self, key: str, make: Callable[[], T]) -> T:
        if key not in self._memo:
            self._memo[key] = make()
        found: T = self._memo[key]
        return found
