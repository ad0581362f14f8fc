"""The random numbers of a process: seeded, kept in a checkpoint, brought back. For models that draw some (dropout).

slimpipe's own models draw none in training, and first weights and the order of the data have generators of their own.
"""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed(value: int, rank: int, step: int, device: torch.device) -> None:
    """Seeds torch, CUDA, numpy and Python, apart for each rank and for each step at which a run begins."""
    number = int.from_bytes(hashlib.sha256(f"{value}:{rank}:{step}".encode()).digest()[:4], "little")
    random.seed(number)
    np.random.seed(number)
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)


def capture(device: torch.device) -> Tensor:
    """All four generators' states, as the bytes of a JSON text [n] uint8."""
    name, keys, *rest = np.random.get_state()
    state: dict[str, Any] = {
        "torch": _hex(torch.get_rng_state()),
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
    }
    if device.type == "cuda":
        state["cuda"] = _hex(torch.cuda.get_rng_state(device))
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


def restore(captured: Tensor, device: torch.device) -> None:
    """Puts back what `capture` gave; what it had not is left alone."""
    state = json.loads(captured.numpy().tobytes())
    torch.set_rng_state(_bytes(state["torch"]))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_bytes(state["cuda"]), device)


def _hex(state: Tensor) -> str:
    return state.numpy().tobytes().hex()


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
