"""DCP's `.metadata` without its danger: the file is a pickle, and a pickle may name anything for the reader to call.

Here it may name the few classes of data that DCP describes tensors with, and nothing else.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

_DESCRIPTION: Final = "torch.distributed.checkpoint.metadata"
_ALLOWED: Final = frozenset(
    {
        (_DESCRIPTION, "Metadata"),
        (_DESCRIPTION, "MetadataIndex"),
        (_DESCRIPTION, "StorageMeta"),
        (_DESCRIPTION, "TensorProperties"),
        (_DESCRIPTION, "TensorStorageMetadata"),
        (_DESCRIPTION, "ChunkStorageMetadata"),
        (_DESCRIPTION, "BytesStorageMetadata"),
        (_DESCRIPTION, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        # Where DCP has noted the folder it wrote to.
        ("pathlib", "Path"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),
        ("pathlib", "PurePosixPath"),
    }
)


class _DataOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"names {module}.{name}, which no description of tensors needs")


def loads(data: bytes) -> Metadata:
    """Raises pickle.UnpicklingError for a pickle that names what it has no business with."""
    found = _DataOnly(io.BytesIO(data)).load()
    if not isinstance(found, Metadata):
        raise pickle.UnpicklingError(f"holds a {type(found).__name__}, not DCP's Metadata")
    return found


class SafeReader(FileSystemReader):
    """DCP's reader of folders, with `.metadata` read as data only. DCP itself loads tensors with `weights_only`."""

    def __init__(self, folder: Path) -> None:
        """Raises what a missing or damaged file makes of it."""
        super().__init__(folder)
        self.metadata = loads((folder / ".metadata").read_bytes())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self.metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self.metadata
