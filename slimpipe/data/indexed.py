"""Megatron's indexed datasets, byte for byte: `PREFIX.bin` has the tokens, `PREFIX.idx` says where sequences end.

The index: magic (9 bytes), version 1 (u64), a code for the tokens' type (u8), number of sequences (u64), number of
document bounds (u64); then the sequences' lengths (i32), their byte offsets (i64), and the document bounds (i64):
document d has the sequences bounds[d] to bounds[d + 1] - 1. All little-endian. What slimpipe writes has one sequence a
document.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import struct
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from slimpipe.data.errors import DataError

_MAGIC: Final = b"MMIDIDX\x00\x00"
_HEAD: Final = struct.Struct("<9sQBQQ")
_TYPES: Final[Mapping[int, np.dtype[Any]]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
_LONGEST: Final = 2**31 - 1  # tokens a sequence: its length is an i32
_CHUNK: Final = 1 << 20


def smallest_dtype(vocab_size: int) -> np.dtype[Any]:
    """uint16 or int32, by megatron-core's own rule."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def prefix_of(path: Path | str) -> Path:
    """`PREFIX` of a pair, given as that, as `PREFIX.bin` or as `PREFIX.idx`."""
    path = Path(path)
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def bin_path(prefix: Path) -> Path:
    """The tokens of a pair. Not `with_suffix`: a prefix may have dots of its own."""
    return prefix.with_name(f"{prefix.name}.bin")


def idx_path(prefix: Path) -> Path:
    """The index of a pair."""
    return prefix.with_name(f"{prefix.name}.idx")


@dataclass(frozen=True, eq=False)
class IndexedDataset:
    """A pair, open for reading and mapped into memory: pages are read when touched."""

    prefix: Path
    tokens: npt.NDArray[Any]  # [count], all sequences one after the other
    lengths: npt.NDArray[np.int32]  # [sequences]
    pointers: npt.NDArray[np.int64]  # [sequences], bytes
    bounds: npt.NDArray[np.int64]  # [documents + 1], sequences

    @classmethod
    def open(cls, path: Path | str) -> IndexedDataset:
        """Raises DataError, naming the file and the remedy, if one of the pair is missing, malformed, cut, or of
        another pair."""
        prefix = prefix_of(path)
        index, data = idx_path(prefix), bin_path(prefix)
        try:
            index_size, data_size = index.stat().st_size, data.stat().st_size
            with index.open("rb") as file:
                head = file.read(_HEAD.size)
        except OSError as error:
            raise DataError(
                f"{error.filename}: cannot be read ({error.strerror}); a token file is a pair, {data.name} and "
                f"{index.name}"
            ) from error
        if head[: len(_MAGIC)] != _MAGIC:
            raise DataError(
                f"{index}: not the index of a Megatron token file (it begins with {head[:9]!r}); {_REBUILD}"
            )
        if len(head) < _HEAD.size:
            raise DataError(f"{index}: cut after {len(head)} bytes; {_REBUILD}")
        _, version, code, sequences, bounds = _HEAD.unpack(head)
        if version != 1:
            raise DataError(f"{index}: version {version} of Megatron's format, only 1 is known; {_REBUILD}")
        if code not in _TYPES:
            raise DataError(f"{index}: unknown type of tokens, code {code}; the codes are 1 to 8; {_REBUILD}")
        size = _HEAD.size + 12 * sequences + 8 * bounds
        if index_size == size + sequences and sequences:
            raise DataError(f"{index}: has modes, so it is multimodal; slimpipe trains on text alone, use another file")
        if index_size != size or not bounds:
            raise DataError(
                f"{index}: has {index_size} bytes, but its head says {sequences} sequences and {bounds} document "
                f"bounds ({size} bytes): it is cut or corrupted; {_REBUILD}"
            )
        lengths = _map(index, "<i4", _HEAD.size, sequences)
        pointers = _map(index, "<i8", _HEAD.size + 4 * sequences, sequences)
        ends = _map(index, "<i8", _HEAD.size + 12 * sequences, bounds)
        dtype = _TYPES[code]
        count = _count(index, lengths, pointers, dtype.itemsize)
        _check_bounds(index, ends, sequences)
        if data_size != count * dtype.itemsize:
            raise DataError(
                f"{data}: has {data_size} bytes, but {index.name} says {count} tokens of {dtype.itemsize} bytes "
                f"({count * dtype.itemsize}): it is cut, or of another pair; {_REBUILD}"
            )
        return cls(prefix, _map(data, dtype, 0, count), lengths, pointers, ends)

    @property
    def documents(self) -> int:
        return len(self.bounds) - 1

    def __len__(self) -> int:
        """Sequences."""
        return len(self.lengths)

    def __getitem__(self, sequence: int) -> npt.NDArray[Any]:
        """The tokens of a sequence."""
        if not 0 <= sequence < len(self):
            raise IndexError(sequence)
        first = int(self.pointers[sequence]) // self.tokens.dtype.itemsize
        return self.tokens[first : first + int(self.lengths[sequence])]

    def document(self, number: int) -> npt.NDArray[Any]:
        """The tokens of a document: of all its sequences."""
        return self.tokens[self.start(number) : self.start(number + 1)]

    def start(self, document: int) -> int:
        """The first token of a document, counted over the file; of the one behind the last, where that ends."""
        sequence = int(self.bounds[document])
        if sequence == len(self):
            return len(self.tokens)
        return int(self.pointers[sequence]) // self.tokens.dtype.itemsize


_REBUILD: Final = "build it again"


def _map(path: Path, dtype: Any, offset: int, count: int) -> npt.NDArray[Any]:
    # An empty file, or an empty end of one, cannot be mapped.
    return np.memmap(path, dtype, "r", offset, (count,)) if count else np.empty(0, dtype)


def _count(index: Path, lengths: npt.NDArray[np.int32], pointers: npt.NDArray[np.int64], itemsize: int) -> int:
    """Tokens of all sequences. Raises DataError unless these lie one after the other, as every writer puts them."""
    end = 0
    for start in range(0, len(lengths), _CHUNK):
        part = lengths[start : start + _CHUNK].astype(np.int64)
        ends = end + np.cumsum(part)
        expected = (ends - part) * itemsize
        wrong = (part < 0) | (expected != pointers[start : start + _CHUNK])
        if wrong.any():
            place = int(wrong.argmax())
            raise DataError(
                f"{index}: sequence {start + place} has length {part[place]} at byte {pointers[start + place]}, but "
                f"the ones before it end at {expected[place]}: it is corrupted; {_REBUILD}"
            )
        end = int(ends[-1])
    return end


def _check_bounds(index: Path, bounds: npt.NDArray[np.int64], sequences: int) -> None:
    for start in range(0, len(bounds), _CHUNK):
        part = bounds[max(0, start - 1) : start + _CHUNK]
        if (start == 0 and part[0] != 0) or (np.diff(part) < 0).any() or part[-1] > sequences:
            raise DataError(f"{index}: its document bounds do not rise from 0 to {sequences}: corrupted; {_REBUILD}")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Makes DataError of what the system says while `path` is written."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{path}: cannot be written ({reason}); make room there, or use another folder") from error


class IndexedWriter:
    """Writes a pair piece by piece. It appears whole when the `with` block ends, or not at all.

    Whatever interrupts it, a power cut too: the index goes last, and without it the tokens count for nothing.
    """

    def __init__(self, prefix: Path, dtype: npt.DTypeLike) -> None:
        """Raises DataError for a type of tokens that the format has not."""
        self.prefix, self.dtype = prefix, np.dtype(dtype).newbyteorder("<")
        codes = [code for code, known in _TYPES.items() if known == self.dtype]
        if not codes:
            raise DataError(f"token files hold {', '.join(t.name for t in _TYPES.values())}, not {np.dtype(dtype)}")
        self._code = codes[0]
        self.count = 0
        self._digest = hashlib.sha256()
        self._lengths, self._bounds, self._open = array("i"), array("q", [0]), 0
        self._temporary = prefix.with_name(f".{prefix.name}.bin.unfinished")
        self._temporary_index = prefix.with_name(f".{prefix.name}.idx.unfinished")

    @property
    def sha256(self) -> str:
        """Of all tokens written so far."""
        return self._digest.hexdigest()

    def __enter__(self) -> IndexedWriter:
        """Raises DataError if the folder cannot be written, or another process is writing this pair."""
        with writing(bin_path(self.prefix)):
            self._file = self._temporary.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Still this file, or the finished work of another writer by now?
            ours = os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._temporary))
        except OSError:
            ours = False
        if not ours:
            self._file.close()
            raise DataError(f"{bin_path(self.prefix)}: another process is writing it; wait for that one")
        self._file.truncate(0)  # what an interrupted build has left
        return self

    def append(self, tokens: npt.ArrayLike) -> None:
        """Adds tokens to the sequence under way. Raises DataError for one that the type cannot hold, and on a full
        disk."""
        given = np.asarray(tokens)
        data = given.astype(self.dtype)
        if given.dtype != self.dtype and not np.array_equal(data, given):
            bad = given[data != given][0]
            raise DataError(f"{bin_path(self.prefix)}: token {bad} does not fit {self.dtype.name}; use a wider type")
        raw = data.tobytes()
        with writing(bin_path(self.prefix)):
            self._file.write(raw)
        self._digest.update(raw)
        self.count += len(data)
        self._open += len(data)
        while self._open > _LONGEST:
            self._lengths.append(_LONGEST)
            self._open -= _LONGEST

    def end_sequence(self) -> None:
        """The sequence under way ends here."""
        self._lengths.append(self._open)
        self._open = 0

    def end_document(self) -> None:
        """The document ends here, and so does a sequence under way that has tokens."""
        if self._open:
            self.end_sequence()
        self._bounds.append(len(self._lengths))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        finished = False
        try:
            if kind is None:
                with writing(bin_path(self.prefix)):
                    self._finish()
                finished = True
        finally:
            # Closing gives up the lock: after that the names may be another's.
            if not finished:
                self._temporary.unlink(missing_ok=True)
                self._temporary_index.unlink(missing_ok=True)
            # On a full disk it would write what is buffered once more.
            with contextlib.suppress(OSError):
                self._file.close()

    def _finish(self) -> None:
        if self._open:
            self.end_document()
        self._file.flush()
        os.fsync(self._file.fileno())
        index, temporary = idx_path(self.prefix), self._temporary_index
        with temporary.open("wb") as file:
            file.write(_HEAD.pack(_MAGIC, 1, self._code, len(self._lengths), len(self._bounds)))
            file.write(np.asarray(self._lengths, "<i4").tobytes())
            for pointers in self._pointers():
                file.write(pointers.tobytes())
            file.write(np.asarray(self._bounds, "<i8").tobytes())
            file.flush()
            os.fsync(file.fileno())
        # An old index must not describe new tokens.
        index.unlink(missing_ok=True)
        os.replace(self._temporary, bin_path(self.prefix))
        os.replace(temporary, index)

    def _pointers(self) -> Iterator[npt.NDArray[np.int64]]:
        end = 0
        for start in range(0, len(self._lengths), _CHUNK):
            part = np.asarray(self._lengths[start : start + _CHUNK], np.int64)
            ends = end + np.cumsum(part)
            yield ((ends - part) * self.dtype.itemsize).astype("<i8")
            end = int(ends[-1])
