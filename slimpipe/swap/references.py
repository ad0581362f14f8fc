"""How many tensors refer to a storage."""

from __future__ import annotations

import functools

import torch


def references(storage: int) -> int:
    """Tensors that refer to the storage at this address (`_cdata`).

    `untyped_storage()` was called on one of them before. The address must be good: the caller holds a tensor of the
    storage or a weak reference to it.
    """
    return torch._C._storage_Use_Count(storage) - count_when_alone() + 1


@functools.cache
def count_when_alone() -> int:
    """What a storage counts when one tensor refers to it: the storage's Python object, once made, counts as well in
    some versions of torch."""
    tensor = torch.empty(1, device="cpu")
    address = tensor.untyped_storage()._cdata
    return int(torch._C._storage_Use_Count(address))
