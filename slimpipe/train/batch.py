"""A global batch: whether it is one, and its way to the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slimpipe.kernels.cross_entropy import IGNORE

if TYPE_CHECKING:
    from slimpipe.config import Config


def check_batch(tokens: Tensor, labels: Tensor, config: Config) -> None:
    """Raises ValueError where tokens or labels are not [global batch, S], or are no words of the vocabulary."""
    shape, words = (config.train.global_batch, config.data.sequence_length), config.model.vocab_size
    for what, data in (("tokens", tokens), ("labels", labels)):
        if data.shape != shape:
            raise ValueError(
                f"{what} are {list(data.shape)}, not train.global_batch x data.sequence_length = {list(shape)}"
            )
    counted = labels[labels != IGNORE]
    for what, data in (("tokens", tokens), ("labels", counted)):
        if data.numel() and not 0 <= int(data.min()) <= int(data.max()) < words:
            raise ValueError(
                f"{what} must lie in 0 .. {words - 1} (model.vocab_size = {words}); what does not count is -100"
            )


def to_device(data: Tensor, device: torch.device) -> Tensor:
    """The same on the device; from the host to a GPU without waiting for it."""
    if device.type == "cuda" and data.device.type == "cpu":
        data = data.pin_memory()
    return data.to(device, non_blocking=True)
