"""Files of text, read into batches. What takes time, parsing and encoding, is left to whoever takes a batch."""

from __future__ import annotations

import gzip
import importlib
import io
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from slimpipe.data.errors import DataError

# Bytes a batch, about: enough to be worth sending to a process, few enough for a moving progress bar.
_BATCH_BYTES = 1 << 20
_PIECE_CHARACTERS = 1 << 20
_ROWS = 256


@dataclass
class Batch:
    """Consecutive entries of a file: lines of JSON, or documents and pieces of long ones."""

    path: str
    first: int  # the number of the first entry in its file, from 1
    json_key: str | None = None  # entries are bytes of JSON, and this field of each is a document
    entries: list[Any] = field(default_factory=list)
    ends: list[bool] = field(default_factory=list)  # whether a document ends with the entry; of JSON, each does
    size: int = 0  # bytes of the file that it took

    @property
    def place(self) -> str:
        """Where it begins, as messages have it: `FILE:LINE`."""
        return f"{self.path}:{self.first}"

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """The text, as (text, whether a document ends after it); a piece has at most some 2 M characters.

        Raises DataError, naming file and line, for an entry that has no text.
        """
        if self.json_key is None:
            yield from zip(self.entries, self.ends, strict=True)
            return
        for number, line in enumerate(self.entries, self.first):
            yield from _cut(_json_text(line, self.json_key, f"{self.path}:{number}"))


def reader_of(path: Path) -> Callable[[Path, str], Iterator[Batch]]:
    """What reads `path`, by the end of its name; anything unknown is text."""
    if path.name.endswith((".jsonl", ".json", ".jsonl.gz", ".json.gz")):
        return _read_json_lines
    if path.suffix in (".parquet", ".arrow"):
        return _read_columns
    return _read_text


def _read_text(path: Path, key: str) -> Iterator[Batch]:
    """The file is one document; bytes that are not UTF-8 are replaced."""
    # newline="": the text as it is, without translation of line ends.
    with path.open("rb") as raw, io.TextIOWrapper(raw, "utf-8", "replace", newline="") as file:
        before = 0
        for number, (text, ends) in enumerate(_pieces(file), 1):
            position = raw.tell()
            yield Batch(str(path), number, None, [text], [ends], position - before)
            before = position


def _read_json_lines(path: Path, key: str) -> Iterator[Batch]:
    with path.open("rb") as raw, _unpacked(raw, path) as lines:
        batch, before, held = Batch(str(path), 1, key), 0, 0
        try:
            for number, line in enumerate(lines, 1):
                batch.entries.append(line)
                held += len(line)
                if held >= _BATCH_BYTES:
                    batch.size, before = raw.tell() - before, raw.tell()
                    yield batch
                    batch, held = Batch(str(path), number + 1, key), 0
        except (gzip.BadGzipFile, EOFError) as error:
            raise DataError(f"{path}: not a whole gzip file ({error}); compress it again") from error
        batch.size = raw.tell() - before
        yield batch


def _unpacked(raw: BinaryIO, path: Path) -> AbstractContextManager[Iterable[bytes]]:
    return gzip.open(raw) if path.suffix == ".gz" else nullcontext(raw)


def _json_text(line: bytes, key: str, place: str) -> str:
    if not line.strip():
        return ""
    try:
        entry = json.loads(line)
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 (byte {error.start + 1} of the line); fix or remove the line") from error
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise DataError(f"{place}: not JSON ({reason}); fix or remove the line") from error
    if not isinstance(entry, dict):
        raise DataError(
            f"{place}: {type(entry).__name__} instead of an object with the key {key}; fix or remove the line"
        )
    if key not in entry:
        keys = ", ".join(map(str, entry)) or "no keys at all"
        raise DataError(f"{place}: no key {key}, but {keys[:200]}; {_OTHER_KEY}, or fix the line")
    return _text(entry[key], key, place)


def _text(value: Any, key: str, place: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{place}: {key} is {type(value).__name__}, not text; {_OTHER_KEY}, or fix it")
    # JSON can spell half of a surrogate pair, which no encoding has.
    return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")


_OTHER_KEY = "name the one that has the text (data.text_key, --text-key)"


def _read_columns(path: Path, key: str) -> Iterator[Batch]:
    """Parquet, and Arrow as Hugging Face `datasets` saves it: column `key`, a document a row."""
    try:
        arrow = importlib.import_module("pyarrow")
        ipc, parquet = importlib.import_module("pyarrow.ipc"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise DataError(f"{path}: needs pyarrow, which is not installed; pip install 'slimpipe[parquet]'") from error
    try:
        with arrow.memory_map(str(path)) as source:
            if path.suffix == ".parquet":
                file = parquet.ParquetFile(source)
                _check_column(path, file.schema_arrow, key)
                groups, total = file.iter_batches(_ROWS, columns=[key]), file.metadata.num_rows
                yield from _rows(path, key, groups, lambda rows: source.size() * rows // max(1, total))
            else:
                stream = ipc.open_stream(source)
                _check_column(path, stream.schema, key)
                yield from _rows(path, key, stream, lambda rows: source.tell())
    except arrow.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path}: not a whole {path.suffix[1:]} file ({reason[:200]}); write it again") from error


def _check_column(path: Path, schema: Any, key: str) -> None:
    if key not in schema.names:
        raise DataError(f"{path}: no column {key}, but {', '.join(schema.names)[:200]}; {_OTHER_KEY}")
    if str(schema.field(key).type) not in ("string", "large_string", "string_view"):
        raise DataError(f"{path}: column {key} is {schema.field(key).type}, not text; {_OTHER_KEY}")


def _rows(path: Path, key: str, groups: Iterable[Any], read: Callable[[int], int]) -> Iterator[Batch]:
    """`read`: bytes of the file that so many rows took."""
    first, before = 1, 0
    for group in groups:
        texts = group.column(group.schema.get_field_index(key)).to_pylist()
        for number, text in enumerate(texts, first):
            if text is None:
                raise DataError(f"{path}:{number}: {key} is null in this row; remove the row, or {_OTHER_KEY}")
        after = read(first - 1 + len(texts))
        pieces = [piece for text in texts for piece in _cut(text)]
        entries, ends = [text for text, _ in pieces], [last for _, last in pieces]
        yield Batch(str(path), first, None, entries, ends, after - before)
        first, before = first + len(texts), after


def merged(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Small neighbours in one, whole files of text above all."""
    held: Batch | None = None
    for batch in batches:
        if held is not None and held.json_key is None and batch.json_key is None and held.size < _BATCH_BYTES:
            held.entries += batch.entries
            held.ends += batch.ends
            held.size += batch.size
            continue
        if held is not None:
            yield held
        held = batch
    if held is not None:
        yield held


def _cut(text: str) -> Iterator[tuple[str, bool]]:
    """The pieces of a document; none of an empty one."""
    if len(text) > _PIECE_CHARACTERS:
        return _pieces(io.StringIO(text, newline=""))
    return iter([(text, True)] if text else [])


def _pieces(file: TextIO) -> Iterator[tuple[str, bool]]:
    """Text cut after lines, so that memory stays bounded whatever its size; the last piece ends the document."""
    text = _read_piece(file)
    while text:
        following = _read_piece(file)
        yield text, not following
        text = following


def _read_piece(file: TextIO) -> str:
    text = file.read(_PIECE_CHARACTERS)
    # A line end is where a cut disturbs tokens least; the limit is for files without any.
    return text + file.readline(_PIECE_CHARACTERS) if len(text) == _PIECE_CHARACTERS else text
