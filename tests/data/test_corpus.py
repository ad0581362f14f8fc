"""Corpora: which files, in which order, cut into which pieces."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest

from slimpipe.data import DataError, readers
from slimpipe.data import corpus as corpus_module
from slimpipe.data.corpus import Corpus, open_corpus


def pieces(corpus: Corpus) -> list[tuple[str, bool]]:
    return [piece for batch in corpus.batches("text") for piece in batch.pieces()]


def documents(corpus: Corpus) -> list[str]:
    texts, text = [], ""
    for piece, ends in pieces(corpus):
        text += piece
        if ends:
            texts.append(text)
            text = ""
    assert text == ""
    return texts


def test_python_stdlib_is_the_interpreters_own() -> None:
    corpus = open_corpus("python_stdlib")
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [path.relative_to(root).as_posix() for path in corpus.files]
    assert {"argparse.py", "json/decoder.py"} < set(names)
    assert names == sorted(names)
    assert not any({"test", "tests", "site-packages", "dist-packages"} & set(Path(name).parts) for name in names)
    assert 5e6 < corpus.size <= 20e6
    assert corpus == open_corpus("python_stdlib")


def test_python_stdlib_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = open_corpus("python_stdlib")
    monkeypatch.setattr(corpus_module, "_STDLIB_BYTES", 1_000_000)
    limited = open_corpus("python_stdlib")
    assert 500_000 < limited.size <= 1_000_000
    assert limited.files == whole.files[: len(limited.files)]


def test_folder(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name, text in {
        "b/x.py": "x\r\n", "a.txt": "a\n", "c.md": "ü", "d.bin": "no", ".git/e.txt": "no", "b.txt": "b", "f.txt": "",
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(text.encode())
    corpus = open_corpus(str(tmp_path))
    assert documents(corpus) == ["a\n", "b", "x\r\n", "ü"]
    assert corpus.size == 2 + 1 + 3 + 2


def test_file_with_any_name_and_bytes_that_are_not_text(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_bytes(b"caf\xe9 \xc3\xa9")
    assert documents(open_corpus(str(path))) == ["caf\ufffd é"]


def test_long_documents_are_cut_after_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_PIECE_CHARACTERS", 10)
    text = "".join(f"line {i}\n" for i in range(20))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text("y" * 95)  # one endless line
    (tmp_path / "c.txt").write_text("short\n" * 2)
    corpus = open_corpus(str(tmp_path))
    cut = pieces(corpus)
    assert documents(corpus) == [text, "y" * 95, "short\n" * 2]
    assert max(len(piece) for piece, _ in cut) <= 20
    assert all(piece.endswith("\n") for piece, _ in cut if "line" in piece)
    assert sum(ends for _, ends in cut) == 3


def test_digest_is_of_names_and_contents(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    first = open_corpus(str(tmp_path)).digest
    path.touch()
    assert open_corpus(str(tmp_path)).digest == first
    path.write_text("two")
    assert open_corpus(str(tmp_path)).digest != first
    path.write_text("one")
    path.rename(tmp_path / "b.txt")
    assert open_corpus(str(tmp_path)).digest != first


def test_a_large_file_is_known_by_a_part_its_size_and_its_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that terabytes are not read at every start. A change that keeps size and sampled parts changes the date."""
    monkeypatch.setattr(corpus_module, "_WHOLE", 10)
    path = tmp_path / "a.txt"
    path.write_text("more than ten bytes")
    os.utime(path, ns=(1, 1))
    first = open_corpus(str(tmp_path)).digest
    assert open_corpus(str(tmp_path)).digest == first
    os.utime(path, ns=(1, 2))
    assert open_corpus(str(tmp_path)).digest != first


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^data.corpus = nowhere: no such file or folder; use a path or python_std"):
        open_corpus("nowhere")
    with pytest.raises(
        DataError, match=r"no text found in .*; a folder is searched for .arrow, .jsonl, .jsonl.gz, .md, "
    ):
        open_corpus(str(tmp_path))
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match="no text found"):
        open_corpus(str(tmp_path / "empty.txt"))


def test_an_interpreter_without_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "python.zip")})
    with pytest.raises(DataError, match="this interpreter comes without its sources"):
        open_corpus("python_stdlib")
