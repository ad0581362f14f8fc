"""What a checkpoint holds of one rank: fp32 weights, moments, counts of steps, under names free of the layout."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from slimpipe.parallel.optimizer import MasterAdamW
from slimpipe.runtime.vocabulary import Shard
from slimpipe.train.checkpoint import Part, State


def live_state(steps_done: int, optimizer: MasterAdamW, shards: Mapping[str, Shard]) -> State:
    """The tensors are the live ones: filling them restores the state (`Session.restored`)."""
    state = {
        "step": Part.whole(torch.tensor(steps_done)),
        "optimizer.updates": Part.whole(optimizer.updates),
    }
    for name, master in optimizer.masters.items():
        state[f"model.{name}"] = _part(name, master.data, shards)
    for key, moment in optimizer.state().items():
        state[f"optimizer.{key}"] = _part(key.rsplit(".", 1)[0], moment, shards)
    return state


def real_rows(name: str, tensor: Tensor, shards: Mapping[str, Shard]) -> Tensor:
    """Without the padding of a vocabulary shard."""
    return tensor[: shards[name].rows.count] if name in shards else tensor


def _part(name: str, tensor: Tensor, shards: Mapping[str, Shard]) -> Part:
    """A vocabulary shard by its place in the whole weight: no layout in the checkpoint."""
    if name not in shards:
        return Part.whole(tensor)
    rows = shards[name].rows
    return Part.rows(real_rows(name, tensor, shards), rows.first, rows.total)
