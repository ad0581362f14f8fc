"""`prepare`: what it builds, when it builds again, and that of many processes one builds."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from slimpipe.data import DataError, PreparedData, TokenFile, build, load_tokenizer, prepare
from slimpipe.data.corpus import open_corpus
from tests.data.conftest import STDLIB_BYTES


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The corpora built while the test runs."""
    names: list[str] = []
    original = build._build

    def counted(corpus: build.Corpus, vocab_size: int, folder: Path, progress: bool) -> None:
        names.append(corpus.name)
        original(corpus, vocab_size, folder, progress)

    monkeypatch.setattr(build, "_build", counted)
    return names


def test_python_stdlib(stdlib: PreparedData, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slimpipe.data.corpus._STDLIB_BYTES", STDLIB_BYTES)
    tokens, tokenizer = TokenFile.open(stdlib.tokens_path), load_tokenizer(stdlib.tokenizer_path)
    assert tokenizer.vocab_size == tokens.vocab_size == 512
    assert (tokens.count, tokens.fingerprint) == (stdlib.count, stdlib.fingerprint)
    assert tokens.source == "python_stdlib"
    assert stdlib.count > 500_000
    assert int(tokens.tokens.max()) < 512
    # The tokens decode to the documents, each with an end of text after it.
    corpus = open_corpus("python_stdlib")
    ends = (tokens.tokens == tokenizer.end_of_text).nonzero()[0]
    assert len(ends) == sum(path.stat().st_size > 0 for path in corpus.files)
    assert ends[-1] == tokens.count - 1
    first, second = [path.read_bytes().decode() for path in corpus.files if path.stat().st_size > 0][:2]
    assert tokenizer.decode(tokens.tokens[: ends[0]].tolist()) == first
    assert tokenizer.decode(tokens.tokens[ends[0] + 1 : ends[1]].tolist()) == second


def test_builds_once(text_file: Path, tmp_path: Path, builds: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    first = prepare(str(text_file), 300, tmp_path / "cache", progress=False)
    assert prepare(str(text_file), 300, tmp_path / "cache", progress=False) == first
    assert len(builds) == 1
    assert capfd.readouterr() == ("", "")
    # Another cache, the same tokens.
    other = prepare(str(text_file), 300, tmp_path / "other", progress=False)
    assert (other.fingerprint, other.count) == (first.fingerprint, first.count)
    assert other.tokenizer_path.read_bytes() == first.tokenizer_path.read_bytes()


def test_builds_again_for_another_text_vocabulary_or_interpreter(
    text_file: Path, tmp_path: Path, builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def folder(corpus: str, vocab_size: int) -> Path:
        return prepare(corpus, vocab_size, tmp_path / "cache", progress=False).tokens_path.parent

    folders = [folder(str(text_file), 300), folder(str(text_file), 301)]
    text_file.write_text(text_file.read_text() + "One more line.\n")
    folders.append(folder(str(text_file), 300))
    assert len(set(folders)) == len(builds) == 3

    digests = {open_corpus("python_stdlib").digest}
    monkeypatch.setattr(platform, "python_version", lambda: "3.99.0")
    digests.add(open_corpus("python_stdlib").digest)
    assert len(digests) == 2


def test_a_long_document_loses_nothing_at_its_cuts(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slimpipe.data.corpus._PIECE_CHARACTERS", 1000)
    monkeypatch.setattr(build, "_BATCH", 4)
    monkeypatch.setattr(build, "_TRAINING_CHARACTERS", 10_000)
    prepared = prepare(str(text_file), 270, tmp_path / "cache", progress=False)
    tokenizer = load_tokenizer(prepared.tokenizer_path)
    tokens = TokenFile.open(prepared.tokens_path).tokens.tolist()
    assert tokens[-1] == tokenizer.end_of_text and tokenizer.end_of_text not in tokens[:-1]
    assert tokenizer.decode(tokens[:-1]) == text_file.read_text()


@pytest.mark.parametrize("damage", ["cut", "flip", "no tokenizer", "bad tokenizer", "bad sidecar"])
def test_a_damaged_cache_is_built_again(text_file: Path, tmp_path: Path, builds: list[str], damage: str) -> None:
    first = prepare(str(text_file), 300, tmp_path / "cache", progress=False)
    data = first.tokens_path.read_bytes()
    if damage == "cut":
        first.tokens_path.write_bytes(data[:-2])
    elif damage == "flip":
        first.tokens_path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    elif damage == "no tokenizer":
        first.tokenizer_path.unlink()
    elif damage == "bad tokenizer":
        first.tokenizer_path.write_text("{}")
    else:
        first.tokens_path.with_suffix(".json").write_text("{")
    assert prepare(str(text_file), 300, tmp_path / "cache", progress=False) == first
    assert len(builds) == 2
    assert first.tokens_path.read_bytes() == data


def test_of_several_processes_one_builds(text_file: Path, tmp_path: Path) -> None:
    """Each appends a line to a file when it builds. The builder takes its time, so that the others really wait."""
    log = tmp_path / "builds"
    code = (
        "import sys, time; from pathlib import Path; from slimpipe.data import build\n"
        "original = build._build\n"
        "def slow(*arguments):\n"
        f"    open({str(log)!r}, 'a').write('built\\n'); time.sleep(1.5); original(*arguments)\n"
        "build._build = slow\n"
        f"print(build.prepare({str(text_file)!r}, 300, Path({str(tmp_path / 'cache')!r})))\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=100) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert log.read_text() == "built\n"
    assert len({out for out, _ in outputs}) == 1


def test_progress_goes_to_stderr(text_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prepare(str(text_file), 300, tmp_path / "cache")
    out, err = capfd.readouterr()
    assert out == ""
    assert "learning 300 tokens" in err and "encoding" in err and "100%" in err


def test_errors(text_file: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"model.vocab_size = 9000: data.corpus = .* has text for \d+ tokens only"):
        prepare(str(text_file), 9000, tmp_path / "cache", progress=False)
    with pytest.raises(DataError, match="at least 257"):
        prepare(str(text_file), 100, tmp_path / "cache", progress=False)
    with pytest.raises(DataError, match="no such file or folder"):
        prepare(str(tmp_path / "none"), 300, tmp_path / "cache", progress=False)
    with pytest.raises(DataError, match="cannot create the data cache"):
        prepare(str(text_file), 300, text_file / "cache", progress=False)
    # What failed left nothing that passes for data.
    assert not list((tmp_path / "cache").rglob("*.json")) + list((tmp_path / "cache").rglob("*.bin"))


def test_cache_below_the_home_folder(text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    prepared = prepare(str(text_file), 300, Path("~/cache"), progress=False)
    assert prepared.tokens_path.is_relative_to(tmp_path / "cache")
    assert os.listdir(tmp_path / "cache")
