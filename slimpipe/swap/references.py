"""How many tensors refer to a storage."""

from __future__ import annotations

import functools

import torch


def references(storage: int) -> int:
    """Tensors that refer to the storage at this address (`_cdata`).

    `untyped_storage()` was called on one of them before. The address must be good: the caller holds a tensor of the
    storage or a weak reference to it.
    """
    return torch._C._storage_Use_Count(storage) - _of_the_python_object()


@functools.cache
def _of_the_python_object() -> int:
    """What the storage's Python object, once made, adds to the count: 0 or 1, depending on the version of torch."""
    tensor = torch.empty(1)
    address = tensor.untyped_storage()._cdata
    return torch._C._storage_Use_Count(address) - 1
