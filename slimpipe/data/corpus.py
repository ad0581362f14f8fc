"""Corpora: where text comes from. A corpus is an ordered list of files; each file is a document.

`python_stdlib` is real text on every machine, offline: the sources of the standard library of the running interpreter.
Anything else is a path: a text file, or a folder of .txt, .py and .md files.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from slimpipe.data.errors import DataError

PYTHON_STDLIB = "python_stdlib"

_SUFFIXES = (".md", ".py", ".txt")
# Packages installed on top of the interpreter and tests differ from machine to machine; the tables of `encodings` are
# generated and teach a model nothing.
_STDLIB_SKIPPED = ("__pycache__", "dist-packages", "encodings", "idle_test", "site-packages", "test", "tests")
# Keeps the build within seconds should a future standard library grow. Today's has some 11 MB.
_STDLIB_BYTES = 20_000_000
_PIECE_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Corpus:
    """An ordered list of text files. `digest` is a sha256 of names and contents, whatever the files' dates are."""

    name: str
    files: tuple[Path, ...]
    size: int  # bytes
    digest: str

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """The text in order, as (text, whether a document ends after it); a piece has at most some 2 M characters.

        Long documents are cut after a line, so that memory stays bounded whatever the size of a file. Bytes that are
        not UTF-8 are replaced.
        """
        for path in self.files:
            # newline="": the text as it is, without translation of line ends.
            with path.open(encoding="utf-8", errors="replace", newline="") as file:
                text = _read_piece(file)
                while text:
                    following = _read_piece(file)
                    yield text, not following
                    text = following


def open_corpus(name: str) -> Corpus:
    """The corpus `name`: `python_stdlib` or a path. Raises DataError if there is no text."""
    if name == PYTHON_STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = _limit(_walk(root, (".py",), _STDLIB_SKIPPED), _STDLIB_BYTES)
        what_to_change = "this interpreter comes without its sources; use a path to a text file or folder"
        # Same files under another interpreter version are rare, yet the cache's name should tell them apart.
        salt = f"{platform.python_implementation()} {platform.python_version()}"
    else:
        root = Path(name).expanduser()
        if not root.exists():
            raise DataError(f"data.corpus = {name}: no such file or folder; use a path or {PYTHON_STDLIB}")
        files = [root] if root.is_file() else _walk(root, _SUFFIXES, ("__pycache__",))
        what_to_change = f"a folder is searched for {', '.join(_SUFFIXES)} files"
        salt = ""

    digest = hashlib.sha256(salt.encode())
    size = 0
    try:
        for path in files:
            relative = path.relative_to(root if root.is_dir() else root.parent).as_posix()
            digest.update(f"\0{relative}\0{path.stat().st_size}\0".encode(errors="surrogateescape"))
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
                    size += len(block)
    except OSError as error:
        raise DataError(f"data.corpus = {name}: cannot read {error.filename}: {error.strerror}") from error
    if size == 0:
        raise DataError(f"data.corpus = {name}: no text found in {root}; {what_to_change}")
    return Corpus(name, tuple(files), size, digest.hexdigest())


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


def _read_piece(file: TextIO) -> str:
    text = file.read(_PIECE_CHARACTERS)
    # A line end is where a cut disturbs tokens least; the limit is for files without any.
    return text + file.readline(_PIECE_CHARACTERS) if len(text) == _PIECE_CHARACTERS else text
