"""Blocks that run twice: `memory.recompute` = all_but_attention and full (docs/recompute.md).

The first run, in the forward, records no gradients and keeps the block's input; in `all_but_attention` the output and
LSE of its attention too. The second, in the backward, records them. In it attention finds the slice's keys and values
in their slot and writes nothing, and in `all_but_attention` it is given its outcome and does not run. `none`, `norms`
and `mlp` are the block's own affair (`slimpipe.models.layers`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from slimpipe.kernels.twice import run_twice
from slimpipe.models.contract import Slice, may_leave_out
from slimpipe.runtime.slice_context import SliceContext

if TYPE_CHECKING:
    from slimpipe.config import Recompute

T = TypeVar("T")


def run_block(block: nn.Module, x: Tensor, slice: Slice, recompute: Recompute) -> Tensor:
    """block(x, slice); x [b, s, H] -> [b, s, H]. A block that is to run twice needs a `SliceContext`."""
    if recompute not in ("all_but_attention", "full") or not torch.is_grad_enabled():
        out: Tensor = block(x, slice)
        return out
    assert isinstance(slice, SliceContext)
    keep = recompute == "all_but_attention"

    def first(x: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        run = _FirstRun(slice, keep)
        out: Tensor = block(x, run)
        return out, run.kept()

    def second(x: Tensor, *kept: Tensor) -> Tensor:
        out: Tensor = block(x, _SecondRun(slice, kept, may_leave_out(block)))
        return out

    return run_twice(first, second, x)


class _FirstRun:
    """The slice as a block's first run sees it. `keep`: what attention gave is kept."""

    again = False

    def __init__(self, slice: SliceContext, keep: bool) -> None:
        self._slice, self._keep = slice, keep
        self._found: tuple[Tensor, ...] = ()
        self._version = 0
        self.positions = slice.positions

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = self._slice.attend_to_keep(layer, q, k, v)
        if self._keep:
            self._found, self._version = (out, lse), out._version
        return out

    def memo(self, key: str, make: Callable[[], T]) -> T:
        return self._slice.memo(key, lambda: _constant(key, make))

    def kept(self) -> tuple[Tensor, ...]:
        if self._found and self._found[0]._version != self._version:
            raise RuntimeError(
                "memory.recompute = all_but_attention: a block has changed what slice.attend gave it in place; make "
                "it a new tensor"
            )
        return self._found


class _SecondRun:
    """The slice as a block's second run sees it. `kept`: (out, LSE) of its attention, or nothing. `again`: what the
    block is told (`Slice.again`)."""

    def __init__(self, slice: SliceContext, kept: Sequence[Tensor], again: bool) -> None:
        self._slice, self._kept, self.again = slice, kept, again
        self.positions = slice.positions

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        known = (self._kept[0], self._kept[1]) if self._kept else None
        return self._slice.attend_again(layer, q, k, v, known)

    def memo(self, key: str, make: Callable[[], T]) -> T:
        return self._slice.memo(key, make)


def _constant(key: str, make: Callable[[], T]) -> T:
    """make(), which must depend on no weight: a first run would lose its gradient without a word."""
    with torch.enable_grad():
        made = make()
    parts: Any = made if isinstance(made, (tuple, list)) else (made,)
    if any(isinstance(part, Tensor) and part.requires_grad for part in parts):
        raise ValueError(
            f"slice.memo({key!r}): depends on weights or activations, which memory.recompute does not allow in a memo; "
            "compute it in the block"
        )
    return made
