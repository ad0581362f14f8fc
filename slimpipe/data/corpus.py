"""Corpora: where text comes from. A corpus is an ordered list of files, of text, JSON lines, Parquet or Arrow.

`python_stdlib` is real text on every machine, offline: the sources of the standard library of the running interpreter.
Anything else is a path: a file, or a folder of such.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slimpipe.data.errors import DataError
from slimpipe.data.fingerprint import fingerprint
from slimpipe.data.indexed import bin_path, idx_path, prefix_of
from slimpipe.data.readers import Batch, merged, reader_of

PYTHON_STDLIB = "python_stdlib"

_SUFFIXES = (".arrow", ".jsonl", ".jsonl.gz", ".md", ".parquet", ".py", ".txt")
# Packages installed on top of the interpreter and tests differ from machine to machine; the tables of `encodings` are
# generated and teach a model nothing.
_STDLIB_SKIPPED = ("__pycache__", "dist-packages", "encodings", "idle_test", "site-packages", "test", "tests")
# Keeps the build within seconds should a future standard library grow. Today's has some 11 MB.
_STDLIB_BYTES = 20_000_000
# Up to this size a file is known by its contents alone; above, by some of them, its size and its date.
_WHOLE = 8 << 20


@dataclass(frozen=True)
class Corpus:
    """An ordered list of files of text. `digest` tells it from another by names and contents."""

    name: str
    files: tuple[Path, ...]
    size: int  # bytes
    digest: str

    def batches(self, key: str) -> Iterator[Batch]:
        """The text in order. `key`: which field of JSON lines, or column of Parquet and Arrow, has it.

        Raises DataError, naming the file and the line or row, for what cannot be read.
        """
        yield from merged(self._batches(key))

    def _batches(self, key: str) -> Iterator[Batch]:
        for path in self.files:
            try:
                yield from reader_of(path)(path, key)
            except OSError as error:
                raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def open_corpus(name: str, where: str = "data.corpus") -> Corpus:
    """The corpus `name`: `python_stdlib` or a path. Raises DataError, beginning with `where`, if there is no text."""
    if name == PYTHON_STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = _limit(_walk(root, (".py",), _STDLIB_SKIPPED), _STDLIB_BYTES)
        what_to_change = "this interpreter comes without its sources; use a path to a text file or folder"
        # Same files under another interpreter version are rare, yet the cache's name should tell them apart.
        salt = f"{platform.python_implementation()} {platform.python_version()}"
    else:
        root = Path(name).expanduser()
        if not root.exists():
            raise DataError(f"{where} = {name}: no such file or folder; use a path or {PYTHON_STDLIB}")
        files = [root] if root.is_file() else _walk(root, _SUFFIXES, ("__pycache__",))
        what_to_change = f"a folder is searched for {', '.join(_SUFFIXES)} files"
        salt = ""

    digest = hashlib.sha256(salt.encode())
    size = 0
    try:
        for path in files:
            relative = path.relative_to(root if root.is_dir() else root.parent).as_posix()
            status = path.stat()
            mark = fingerprint(path) + (f" {status.st_mtime_ns}" if status.st_size > _WHOLE else "")
            digest.update(f"\0{relative}\0{mark}\0".encode(errors="surrogateescape"))
            size += status.st_size
    except OSError as error:
        raise DataError(f"{where} = {name}: cannot read {error.filename}: {error.strerror}") from error
    if size == 0:
        raise DataError(f"{where} = {name}: no text found in {root}; {what_to_change}")
    return Corpus(name, tuple(files), size, digest.hexdigest())


def find_tokens(name: str) -> Path | None:
    """The prefix of the token file that `name` means: `PREFIX`, `PREFIX.bin` or `PREFIX.idx`; None for text."""
    path = Path(name).expanduser()
    if path.suffix in (".bin", ".idx"):
        return prefix_of(path)
    return path if not path.exists() and (bin_path(path).exists() or idx_path(path).exists()) else None


def _walk(root: Path, suffixes: tuple[str, ...], skipped: tuple[str, ...]) -> list[Path]:
    """Files below `root` with one of `suffixes`, in an order that is the same on every machine. No hidden folders."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        found += [Path(folder, name) for name in names if name.endswith(suffixes)]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(root).as_posix())


def _limit(files: list[Path], size: int) -> list[Path]:
    """The longest head of `files` with at most `size` bytes."""
    total = 0
    for i, path in enumerate(files):
        total += path.stat().st_size
        if total > size:
            return files[:i]
    return files
