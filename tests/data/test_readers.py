"""Reading JSON lines, Parquet and Arrow: the same documents from each, and the place of what cannot be read."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slimpipe.data import DataError, readers
from slimpipe.data.corpus import Corpus

TEXTS = ["one\n", "zwei ü", "", "three " * 5, "\u2028 is no line end", "four\r\n"]
KEY = "use another|name the one that has the text"


def documents(path: Path, key: str = "text") -> list[str]:
    found, text = [], ""
    for batch in Corpus("name", (path,), 0, "").batches(key):
        assert batch.size >= 0
        for piece, ends in batch.pieces():
            text += piece
            if ends:
                found.append(text)
                text = ""
    assert not text
    return found


def lines(texts: list[str], key: str = "text") -> str:
    return "".join(json.dumps({"id": 1, key: text, "other": 2}) + "\n" for text in texts)


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(lines(TEXTS) + "\n  \n" + lines(["last"]).rstrip("\n"))
    # Documents without text are left out; an empty line is none, and the last needs no end.
    assert documents(path) == [*filter(None, TEXTS), "last"]
    path.write_text(lines(TEXTS, "content"))
    assert documents(path, "content") == [*filter(None, TEXTS)]


def test_compressed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(lines(TEXTS).encode()))
    assert documents(path) == [*filter(None, TEXTS)]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"a.jsonl.gz: not a whole gzip file \(.*\); compress it again"):
        documents(path)
    path.write_bytes(lines(TEXTS).encode())
    with pytest.raises(DataError, match=r"a.jsonl.gz: not a whole gzip file \(Not a gzipped file"):
        documents(path)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), max_size=9), st.integers(1, 40))
def test_batches_and_cuts_change_nothing(tmp_path: Path, texts: list[str], size: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(lines(texts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "_BATCH_BYTES", size)
        patch.setattr(readers, "_PIECE_CHARACTERS", 7)
        assert documents(path) == [*filter(None, texts)]


BAD_LINES = {
    "no JSON": (
        b'{"text": "a"',
        r"a.jsonl:3: not JSON \(Expecting ',' delimiter.*, column \d+\); fix or remove the line",
    ),
    "two objects": (b'{"text": "a"} {}', r"a.jsonl:3: not JSON \(Extra data, column 15\)"),
    "deep": (b"[" * 100_000, r"a.jsonl:3: not JSON \("),
    "a list": (b'["a"]', "a.jsonl:3: list instead of an object with the key text; fix or remove the line"),
    "no key": (b'{"id": 1, "body": "a"}', "a.jsonl:3: no key text, but id, body; name the one that has the text"),
    "no keys": (b"{}", "a.jsonl:3: no key text, but no keys at all"),
    "a number": (b'{"text": 3}', "a.jsonl:3: text is int, not text"),
    "null": (b'{"text": null}', "a.jsonl:3: text is NoneType, not text"),
    "bytes": (b'{"text": "\xff"}', r"a.jsonl:3: not UTF-8 \(byte 11 of the line\); fix or remove the line"),
}


@pytest.mark.parametrize("bad", BAD_LINES)
def test_a_bad_line_is_named(bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line, message = BAD_LINES[bad]
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(["one"]).encode() + b"\n" + line + b"\n" + lines(["four"]).encode())
    for size in (1, 1 << 20):  # the line number counts from the file's first line, whatever the batch
        monkeypatch.setattr(readers, "_BATCH_BYTES", size)
        with pytest.raises(DataError, match=message):
            documents(path)


def test_half_of_a_surrogate_pair(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud800b"}\n')
    assert documents(path) == ["a?b"]


@pytest.fixture
def arrow() -> Any:
    return pytest.importorskip("pyarrow")


@pytest.fixture(params=["parquet", "arrow"])
def columns(request: pytest.FixtureRequest, arrow: Any, tmp_path: Path) -> Any:
    """`columns(table)` writes it, as Parquet or as `datasets` saves Arrow, in parts of four rows."""
    from pyarrow import ipc, parquet

    def write(**table: list[Any]) -> Path:
        path = tmp_path / f"a.{request.param}"
        data = arrow.table(table)
        if request.param == "parquet":
            parquet.write_table(data, path, row_group_size=4)
        else:
            with arrow.OSFile(str(path), "wb") as file, ipc.new_stream(file, data.schema) as writer:
                writer.write_table(data, max_chunksize=4)
        return path

    return write


def test_columns(columns: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_ROWS", 3)
    texts = TEXTS * 3
    assert documents(columns(id=list(range(18)), text=texts)) == [*filter(None, texts)]
    assert documents(columns(body=texts, id=list(range(18))), "body") == [*filter(None, texts)]
    monkeypatch.setattr(readers, "_PIECE_CHARACTERS", 4)
    assert documents(columns(text=texts)) == [*filter(None, texts)]


def test_bad_columns(columns: Any) -> None:
    path = columns(body=["a"], id=[1])
    with pytest.raises(DataError, match=rf"{path.name}: no column text, but body, id; name the one that has the text"):
        documents(path)
    with pytest.raises(DataError, match=rf"{path.name}: column id is int64, not text; name the one"):
        documents(path, "id")
    path = columns(text=["a"] * 6 + [None])
    with pytest.raises(DataError, match=rf"{path.name}:7: text is null in this row; remove the row"):
        documents(path)


def test_damaged_columns(columns: Any) -> None:
    path = columns(text=["some text"] * 50)
    data = path.read_bytes()
    for cut in (data[:-1] if path.suffix == ".parquet" else data[:-100], b"no such format", b""):
        path.write_bytes(cut)
        with pytest.raises(DataError, match=rf"{path.name}: (not a whole|cannot be read)"):
            documents(path)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_without_pyarrow(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(
        DataError, match=rf"{name}: needs pyarrow, which is not installed; pip install 'slimpipe\[parquet\]"
    ):
        documents(tmp_path / name)
