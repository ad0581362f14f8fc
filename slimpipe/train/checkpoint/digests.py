"""sha256 of every file of a checkpoint: taken while it is written, kept in a manifest, verified before it is read.

The manifest is written last. A folder without one is no checkpoint. Its digests are in hex, as `sha256sum` prints them.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import StorageMeta

MANIFEST: Final = "manifest.json"

_AT_ONCE: Final = 4  # files a process hashes side by side; hashlib lets go of the interpreter
_BLOCK: Final = 1 << 22


@dataclass(frozen=True)
class Digest:
    size: int
    sha256: str


Digests = Mapping[str, Digest]
"""By the file's name in the checkpoint's folder."""


class _Stream(io.RawIOBase):
    """A file being written front to back, and the digest of what has been asked to be written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash, self._size = hashlib.sha256(), 0
        self.error: OSError | None = None
        """The first one: torch.save makes something unreadable of it on the way out."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        data = view = memoryview(data).cast("B")
        self._hash.update(view)
        try:
            while len(view) > 0:
                written = self._file.write(view)  # less than all of it where there is much, or little room
                self._size += written
                view = view[written:]
        except OSError as error:
            self.error = self.error or error
            raise
        return len(data)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()

    @property
    def digest(self) -> Digest:
        return Digest(self._size, self._hash.hexdigest())


class _DigestingFiles(FileSystem):
    def __init__(self) -> None:
        super().__init__()
        self.digests: dict[str, Digest] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with Path(path).open(mode, buffering=0) as file:
            stream = _Stream(file)
            try:
                yield stream
            except Exception:
                if stream.error is not None:
                    raise stream.error from None
                raise
        self.digests[Path(path).name.removesuffix(".tmp")] = stream.digest


class DigestingWriter(FileSystemWriter):
    """DCP's writer of folders, which also knows the digest of every file that this rank writes."""

    def __init__(self, folder: Path, a_file_a_tensor: bool = False) -> None:
        super().__init__(
            folder,
            single_file_per_rank=not a_file_a_tensor,
            sync_files=True,
            # No copying ahead: it would go by way of the current stream, which is the training's.
            per_thread_copy_ahead=0,
            overwrite=True,
        )
        self.fs = self._files = _DigestingFiles()

    @property
    def digests(self) -> Digests:
        return self._files.digests

    def storage_meta(self) -> StorageMeta:
        """Without the folder's path: it is renamed."""
        return StorageMeta()


def write_json(path: Path, content: Any) -> Digest:
    """On disk when it returns."""
    data = (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return digest_of(data)


def digest_of(data: bytes) -> Digest:
    return Digest(len(data), hashlib.sha256(data).hexdigest())


def write_manifest(folder: Path, digests: Digests) -> None:
    files = {name: {"size": digest.size, "sha256": digest.sha256} for name, digest in sorted(digests.items())}
    write_json(folder / MANIFEST, {"files": files})


def read_manifest(folder: Path) -> Digests:
    """Raises OSError or ValueError where there is none or it makes no sense."""
    try:
        files = json.loads((folder / MANIFEST).read_bytes())["files"]
        digests = {str(name): Digest(int(file["size"]), str(file["sha256"])) for name, file in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} is damaged") from error
    strange = [name for name in digests if Path(name).name != name]
    if strange or not digests:
        raise ValueError(f"{MANIFEST} is damaged")
    return digests


def faults(folder: Path, share: int = 0, shares: int = 1) -> list[str]:
    """What is wrong with a checkpoint's files; of the `share`-th part of them, where several processes look."""
    try:
        files = sorted(read_manifest(folder).items(), key=lambda item: (-item[1].size, item[0]))
    except FileNotFoundError:
        return [f"{MANIFEST} is missing"]
    except (OSError, ValueError) as error:
        return [_reason(error)]
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        found = threads.map(lambda item: _fault(folder / item[0], item[1]), files[share::shares])
        return [fault for fault in found if fault is not None]


def _fault(path: Path, expected: Digest) -> str | None:
    try:
        size = path.stat().st_size
        if size != expected.size:
            return f"{path.name} has {size} bytes, not {expected.size}"
        if _sha256(path) != expected.sha256:
            return f"{path.name} is damaged (its sha256 is another)"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name}: {_reason(error)}"
    return None


def _sha256(path: Path) -> str:
    found, block = hashlib.sha256(), bytearray(_BLOCK)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            found.update(memoryview(block)[:count])
    return found.hexdigest()


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) and error.strerror else str(error)) or type(error).__name__
