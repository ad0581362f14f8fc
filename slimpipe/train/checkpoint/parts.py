"""Parts of tensors, and the DCP planners that write and read them under the tensors' own names.

A rank says of each tensor what part of it it holds; DCP puts the parts together, whatever they are, so that a
checkpoint can be read back in other parts: no layout is written down.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from slimpipe.train.checkpoint.errors import CheckpointError


@dataclass(frozen=True)
class Part:
    """`tensor` is the block at `offsets` of a tensor of shape `size`."""

    tensor: Tensor
    offsets: tuple[int, ...]
    size: tuple[int, ...]

    @staticmethod
    def whole(tensor: Tensor) -> Part:
        return Part(tensor, (0,) * tensor.dim(), tuple(tensor.shape))

    @staticmethod
    def rows(tensor: Tensor, first: int, total: int) -> Part:
        """Rows `first` .. of a tensor of `total` rows."""
        return Part(tensor, (first, *(0,) * (tensor.dim() - 1)), (total, *tensor.shape[1:]))

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), self.tensor.shape)

    def on(self, tensor: Tensor) -> Part:
        """The same part with its values in `tensor`."""
        return dataclasses.replace(self, tensor=tensor)

    def values(self) -> Tensor:
        """What is written of it, asked for when its turn comes."""
        return self.tensor.detach()


State = Mapping[str, Part]


class PartsToSave(DefaultSavePlanner):
    """Writes a rank's parts, each as one block. Empty ones are left out."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        items = [_write_item(name, part) for name, part in self.state_dict.items() if part.tensor.numel() > 0]
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        part: Part = self.state_dict[write_item.index.fqn]
        return part.values()


def _write_item(name: str, part: Part) -> WriteItem:
    properties = TensorProperties(dtype=part.tensor.dtype)
    data = TensorWriteData(part.chunk, properties, torch.Size(part.size))
    return WriteItem(MetadataIndex(name, part.offsets), WriteItemType.SHARD, tensor_data=data)


class PartsToLoad(DefaultLoadPlanner):
    """Fills a rank's parts from whatever blocks the checkpoint has. Nothing but tensors is ever asked for."""

    def __init__(self, where: object) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._where = where

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Raises CheckpointError, naming the first tensor that is not there or has another shape."""
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, part in self.state_dict.items():
            entry = stored(self.metadata, name, self._where)
            if tuple(entry.size) != part.size:
                raise CheckpointError(
                    f"{self._where}: {name} has shape {tuple(entry.size)}, the settings say {part.size}; "
                    "use the settings it was trained with"
                )
            if part.tensor.numel() > 0:
                items += create_read_items_for_chunk_list(name, entry, [part.chunk])
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target: Tensor = self.state_dict[read_item.dest_index.fqn].tensor.detach()
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{self._where}: {read_item.dest_index.fqn} is no tensor, and nothing else is read")


def stored(metadata: Metadata, name: str, where: object) -> TensorStorageMetadata:
    """What the checkpoint says of a tensor. Raises CheckpointError where it has none of that name."""
    entry = metadata.state_dict_metadata.get(name)
    if not isinstance(entry, TensorStorageMetadata):
        raise CheckpointError(f"{where}: holds no tensor {name}; are the settings those it was trained with?")
    return entry
