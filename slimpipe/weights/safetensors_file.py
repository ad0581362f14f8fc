"""The safetensors format: a JSON header with each tensor's type, shape and place, then the bytes. Executes nothing.

Eight bytes, little-endian, say how long the header is; places count from its end. Any rows of a tensor can be read, and
no others are; tensors are written one after the other, so that a file may be larger than memory.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from slimpipe.weights.errors import WeightsError

_DTYPES: Final = MappingProxyType(
    {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)
_NAMES: Final = MappingProxyType({dtype: name for name, dtype in _DTYPES.items()})
_LARGEST_HEADER: Final = 100_000_000  # bytes; the reference reader's limit


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file; `start` is where its bytes begin."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def rows(self, first: int, count: int) -> Tensor:
        """Rows `first` .. `first + count - 1` (elements of a vector), a view of the file, read when touched."""
        size = math.prod(self.shape[1:]) * self.dtype.itemsize
        if count == 0 or size == 0:
            return torch.empty(count, *self.shape[1:], dtype=self.dtype)
        # Copy on write: torch wants memory that may be written to, and the file stays as it is.
        data = np.memmap(self.path, np.uint8, mode="c", offset=self.start + first * size, shape=(count * size,))
        return torch.from_numpy(data).view(self.dtype).view(count, *self.shape[1:])


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The file's tensors by name. Raises WeightsError for a file that is missing, cut, or none of this format."""
    try:
        total = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if total < 8 or length > min(_LARGEST_HEADER, total - 8):
                raise WeightsError(f"{path}: no safetensors file, or cut off ({total} bytes); fetch it again")
            header = json.loads(file.read(length))
        entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
        return {name: _stored(path, name, entry, 8 + length, total) for name, entry in entries}
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({error.strerror}); fetch it again") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, WeightsError):
            raise
        raise WeightsError(f"{path}: its header is damaged; fetch it again") from error


def _stored(path: Path, name: str, entry: Mapping[str, Any], begin: int, total: int) -> StoredTensor:
    kind, (start, stop) = entry["dtype"], entry["data_offsets"]
    if kind not in _DTYPES:
        raise WeightsError(
            f"{path}: tensor {name} is of type {kind}, not one of {', '.join(_DTYPES)}; quantised weights are not read"
        )
    found = StoredTensor(path, name, _DTYPES[kind], tuple(map(int, entry["shape"])), begin + int(start))
    if stop - start != found.nbytes or start < 0:
        what = f"tensor {name} of shape {list(found.shape)}"
        raise WeightsError(f"{path}: {what} has {stop - start} bytes; fetch it again")
    if begin + stop > total:
        raise WeightsError(f"{path}: cut off at {total} bytes, within tensor {name}; fetch it again")
    return found


@dataclass(frozen=True)
class TensorToWrite:
    """`read` gives it when its turn comes, of this type and shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_file(path: Path, tensors: Mapping[str, TensorToWrite]) -> None:
    """Writes the file, on disk when it returns; one tensor at a time is in memory. Raises OSError."""
    assert sys.byteorder == "little", "the format is little-endian"
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        offsets = [at, at + tensor.nbytes]
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        at = offsets[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that tensors begin at multiples of eight
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            values = tensor.read()
            assert (values.dtype, tuple(values.shape)) == (tensor.dtype, tensor.shape), name
            file.write(values.contiguous().view(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
