"""Where a tensor lies in its storage: what is copied for it, and how it is put together again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 512
"""Bytes. A compact copy begins at a multiple of this, so a restored view has the alignment it had (the GPU's blocks are
aligned to 512 bytes): kernels choose their vector widths by it, and so the order of their sums."""


@dataclass(frozen=True, slots=True)
class Layout:
    """dtype, sizes, strides and offset (in elements, from the start of the storage) of a strided tensor."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: Tensor) -> Layout:
        return Layout(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def span(self) -> tuple[int, int]:
        """Bytes [begin, end) of the storage between the first and the last element. No dimension may be empty."""
        last = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        width = self.dtype.itemsize
        return self.offset * width, (self.offset + last + 1) * width


def range_to_move(layout: Layout, storage_bytes: int) -> tuple[int, int]:
    """Bytes [begin, end) of the storage to copy for a tensor in it.

    The whole storage where the tensor spans half of it or more: its other views then share the copy, and moving less
    would free nothing, for the tensor itself keeps the whole storage alive. Else the tensor's own span, aligned.
    """
    begin, end = layout.span()
    if 2 * (end - begin) >= storage_bytes:
        return 0, storage_bytes
    return begin // ALIGNMENT * ALIGNMENT, end


def bytes_of(storage: torch.UntypedStorage, begin: int, end: int) -> Tensor:
    """Bytes [begin, end) of a storage as uint8, on the storage's device, without a copy."""
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, begin, (end - begin,), (1,))


def view_of(storage: torch.UntypedStorage, layout: Layout, begin: int) -> Tensor:
    """The tensor of `layout` in a storage that holds what lay at bytes `begin` and after of the original one."""
    tensor = torch.empty(0, dtype=layout.dtype, device=storage.device)
    offset = layout.offset - begin // layout.dtype.itemsize
    return tensor.set_(storage, offset, layout.size, layout.stride)
