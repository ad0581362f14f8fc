"""Takes a step's memory from the driver before the first step."""

from __future__ import annotations

from typing import Final

import torch

SMALL: Final = 2**20
"""Bytes: the largest tensor that torch's allocator for CUDA takes from its pool of small ones."""


def reserve(total: int, small: int, device: torch.device) -> int:
    """Takes from the driver what a step will need beside what is allocated now, `total` bytes with it, and leaves it to
    the allocator. Returns the bytes taken; 0 on the CPU.

    The steps then find their memory in the cache: no cudaMalloc while a receive is outstanding. `small` of the bytes
    are of tensors up to SMALL, which the allocator keeps in segments of their own. What the warm-up left in the cache
    goes back first: in pieces of its shapes it would be of little use. Takes no more than what is free, less a
    twentieth.
    """
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    missing = max(0, min(total - torch.cuda.memory_allocated(device), int(free * 0.95)))
    few = min(small, missing) // SMALL
    sizes = [*[SMALL] * few, missing - few * SMALL]
    # Held all at once, so that each is memory of its own.
    held = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    return sum(tensor.nbytes for tensor in held)
