"""`open_data`'s cache: what is built, when it is built again, and that of many processes one builds."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slimpipe.data import DataError, RunData, TokenFile, build, cache, load_tokenizer, readers
from slimpipe.data.corpus import open_corpus
from slimpipe.data.indexed import bin_path, idx_path
from slimpipe.data.tokens import description_path
from tests.data.conftest import STDLIB_BYTES


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is built while the test runs: corpora into tokens, and tokenizers."""
    names: list[str] = []
    tokens, tokenizer = build.build_tokens, build.learn_tokenizer

    def counted_tokens(corpora: list[Any], *arguments: Any, **settings: Any) -> Any:
        names.extend(corpus.name for corpus in corpora)
        return tokens(corpora, *arguments, **settings)

    def counted_tokenizer(*arguments: Any, **settings: Any) -> None:
        names.append("a tokenizer")
        tokenizer(*arguments, **settings)

    monkeypatch.setattr(cache, "build_tokens", counted_tokens)
    monkeypatch.setattr(cache, "learn_tokenizer", counted_tokenizer)
    return names


def tokens_of(data: RunData) -> TokenFile:
    (part,) = data.train.parts
    return part.tokens


def tokenizer_folder(data: RunData) -> Path:
    (folder,) = tokens_of(data).prefix.parent.parent.glob("tokenizer-*")
    return folder


def test_python_stdlib(stdlib: RunData, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slimpipe.data.corpus._STDLIB_BYTES", STDLIB_BYTES)
    tokens, tokenizer = tokens_of(stdlib), stdlib.tokenizer
    assert tokenizer is not None and tokens.description is not None
    assert tokenizer.vocab_size == tokens.description.vocab_size == 512
    assert tokens.description.source == "python_stdlib"
    assert tokens.count > 500_000
    assert int(tokens.tokens.max()) < 512
    tokens.verify()
    # The tokens decode to the documents, each with an end of text after it.
    files = [path for path in open_corpus("python_stdlib").files if path.stat().st_size > 0]
    assert tokens.dataset.documents == len(tokens.dataset) == len(files)
    assert (tokens.tokens == tokenizer.end_of_text).sum() == len(files)
    for number in (0, 1, len(files) - 1):
        *ids, end = tokens.dataset.document(number).tolist()
        assert end == tokenizer.end_of_text
        assert tokenizer.decode(ids) == files[number].read_bytes().decode()


def test_builds_once(
    opened: Callable[..., RunData],
    text_file: Path,
    builds: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    first, second = opened(corpus=str(text_file)), opened(corpus=str(text_file))
    assert first.fingerprint == second.fingerprint
    assert builds == ["a tokenizer", str(text_file)]
    assert capfd.readouterr() == ("", "")
    # Another cache, the same tokens.
    other = opened(corpus=str(text_file), cache_dir=str(tmp_path / "other"))
    assert other.fingerprint == first.fingerprint
    name = "tokenizer.json"
    assert (tokenizer_folder(other) / name).read_bytes() == (tokenizer_folder(first) / name).read_bytes()


def test_builds_again_for_another_text_vocabulary_or_interpreter(
    opened: Callable[..., RunData], text_file: Path, builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tokens_of(opened(size, corpus=str(text_file))).prefix for size in (300, 301)]
    text_file.write_text(text_file.read_text() + "One more line.\n")
    folders.append(tokens_of(opened(corpus=str(text_file))).prefix)
    assert len(set(folders)) == 3 and len(builds) == 6

    digests = {open_corpus("python_stdlib").digest}
    monkeypatch.setattr(platform, "python_version", lambda: "3.99.0")
    digests.add(open_corpus("python_stdlib").digest)
    assert len(digests) == 2


def test_a_long_document_loses_nothing_at_its_cuts(
    opened: Callable[..., RunData], text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_PIECE_CHARACTERS", 1000)
    monkeypatch.setattr(readers, "_BATCH_BYTES", 4000)
    monkeypatch.setattr(build, "_TRAINING_BYTES", 10_000)
    data = opened(270, corpus=str(text_file))
    assert data.tokenizer is not None
    *ids, end = tokens_of(data).tokens.tolist()
    assert end == data.tokenizer.end_of_text and end not in ids
    assert data.tokenizer.decode(ids) == text_file.read_text()


DAMAGE = ["cut", "flip", "no tokenizer", "bad tokenizer", "bad description", "no description", "no index"]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_built_again(
    opened: Callable[..., RunData], text_file: Path, builds: list[str], damage: str
) -> None:
    first = opened(corpus=str(text_file))
    prefix, tokenizer = tokens_of(first).prefix, tokenizer_folder(first) / "tokenizer.json"
    data = bin_path(prefix).read_bytes()
    if damage == "cut":
        bin_path(prefix).write_bytes(data[:-2])
    elif damage == "flip":
        bin_path(prefix).write_bytes(bytes([data[0] ^ 1]) + data[1:])
    elif damage == "no tokenizer":
        tokenizer.unlink()
    elif damage == "bad tokenizer":
        tokenizer.write_text("{}")
    elif damage == "bad description":
        description_path(prefix).write_text("{")
    elif damage == "no description":
        description_path(prefix).unlink()
    else:
        idx_path(prefix).unlink()
    builds.clear()
    assert opened(corpus=str(text_file)).fingerprint == first.fingerprint
    assert len(builds) == 1
    assert bin_path(prefix).read_bytes() == data
    load_tokenizer(tokenizer)


def test_of_several_processes_one_builds(text_file: Path, tmp_path: Path) -> None:
    """Each appends a line to a file when it builds. The builder takes its time, so that the others really wait."""
    log = tmp_path / "builds"
    code = (
        "import time; from slimpipe.config import DataConfig; from slimpipe.data import cache, open_data\n"
        "original = cache.build_tokens\n"
        "def slow(*arguments, **settings):\n"
        f"    open({str(log)!r}, 'a').write('built\\n'); time.sleep(1.5); return original(*arguments, **settings)\n"
        "cache.build_tokens = slow\n"
        f"c = DataConfig(corpus={str(text_file)!r}, sequence_length=32, cache_dir={str(tmp_path / 'cache')!r})\n"
        "print(open_data(c, 300, 0).fingerprint)\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=100) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert log.read_text() == "built\n"
    assert len({out for out, _ in outputs}) == 1


def test_errors(opened: Callable[..., RunData], text_file: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"model.vocab_size = 9000: data.corpus = .* has text for \d+ tokens only"):
        opened(9000, corpus=str(text_file))
    with pytest.raises(DataError, match="at least 257"):
        opened(100, corpus=str(text_file))
    with pytest.raises(DataError, match="no such file or folder"):
        opened(corpus=str(tmp_path / "none"))
    with pytest.raises(DataError, match=r"^data.cache_dir: cannot create .*; use another folder"):
        opened(corpus=str(text_file), cache_dir=str(text_file / "cache"))
    # What failed left nothing that passes for data.
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.suffix in (".bin", ".idx", ".json")]


def test_cache_below_the_home_folder(
    opened: Callable[..., RunData], text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    data = opened(corpus=str(text_file), cache_dir="~/cache")
    assert tokens_of(data).prefix.is_relative_to(tmp_path / "cache")
