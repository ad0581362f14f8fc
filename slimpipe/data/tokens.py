"""Token files: a flat little-endian array (`tokens.bin`) with a JSON description beside it (`tokens.json`)."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from slimpipe.data.errors import DataError

_DTYPES: Mapping[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_REBUILD = "delete it, and it will be built again"


@dataclass(frozen=True, eq=False)
class TokenFile:
    """A token file, open for reading. `tokens` is mapped into memory: pages are read when touched."""

    path: Path
    tokens: np.ndarray[Any, np.dtype[Any]]  # [count], uint16 or uint32
    vocab_size: int
    fingerprint: str  # sha256 of the array's bytes
    source: str  # the corpus it was made from, as named in the settings

    @property
    def count(self) -> int:
        return len(self.tokens)

    @classmethod
    def open(cls, path: Path | str) -> TokenFile:
        """Opens `path` (the .bin file). Raises DataError if it or its description is missing, malformed or cut."""
        path = Path(path)
        sidecar = sidecar_path(path)
        try:
            description = json.loads(sidecar.read_text(encoding="utf-8"))
            dtype = _DTYPES[description["dtype"]]
            count, vocab_size = int(description["count"]), int(description["vocab_size"])
            fingerprint, source = str(description["sha256"]), str(description["source"])
        except OSError as error:
            raise DataError(f"cannot read {sidecar}, the description of {path.name}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{sidecar} does not describe a token file ({error!r}); {_REBUILD}") from error
        try:
            size = path.stat().st_size
        except OSError as error:
            raise DataError(f"cannot read the token file {path}: {error.strerror}") from error
        if count < 1 or size != count * dtype.itemsize:
            raise DataError(
                f"token file {path} has {size} bytes, but {sidecar.name} says {count} tokens of "
                f"{dtype.itemsize} bytes ({count * dtype.itemsize}): it is cut or corrupted; {_REBUILD}"
            )
        return cls(path, np.memmap(path, dtype=dtype, mode="r", shape=(count,)), vocab_size, fingerprint, source)

    def verify(self) -> None:
        """Reads the whole file. Raises DataError if its contents are not what was written."""
        digest = hashlib.sha256()
        for start in range(0, self.count, 1 << 22):
            digest.update(self.tokens[start : start + (1 << 22)].tobytes())
        if digest.hexdigest() != self.fingerprint:
            raise DataError(f"token file {self.path} is corrupted: its contents do not match its sha256; {_REBUILD}")


class TokenWriter:
    """Writes a token file piece by piece. It appears whole when the `with` block ends, or not at all.

    `uint16` holds vocabularies of up to 65,536 tokens, `uint32` larger ones.
    """

    def __init__(self, path: Path, vocab_size: int, source: str) -> None:
        self.path = path
        self.vocab_size = vocab_size
        self.source = source
        self.count = 0
        self.dtype_name = "uint16" if vocab_size <= 1 << 16 else "uint32"
        self._digest = hashlib.sha256()
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")

    def __enter__(self) -> TokenWriter:
        self._file = self._temporary.open("wb")
        return self

    def append(self, ids: Sequence[int]) -> None:
        """Adds tokens. Raises DataError for an id outside of the vocabulary."""
        array = np.asarray(ids, dtype=np.int64)
        if array.size and (array.min() < 0 or array.max() >= self.vocab_size):
            raise DataError(f"token ids {array.min()}..{array.max()} do not fit a vocabulary of {self.vocab_size}")
        data = array.astype(_DTYPES[self.dtype_name]).tobytes()
        self._file.write(data)
        self._digest.update(data)
        self.count += array.size

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        if kind is not None:
            self._temporary.unlink()
            return
        description = {
            "dtype": self.dtype_name,
            "count": self.count,
            "vocab_size": self.vocab_size,
            "sha256": self._digest.hexdigest(),
            "source": self.source,
        }
        # The description goes last: with it the file counts as written. An old one must not describe new tokens.
        sidecar = sidecar_path(self.path)
        sidecar.unlink(missing_ok=True)
        os.replace(self._temporary, self.path)
        self._temporary.write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
        os.replace(self._temporary, sidecar)


def sidecar_path(path: Path) -> Path:
    """The description of the token file `path`."""
    return path.with_suffix(".json")
