"""Building token files: the same bytes from any number of processes, and nothing half done whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slimpipe.data import DataError, TextTokenizer, TokenFile, load_tokenizer, readers
from slimpipe.data.build import build_tokens
from slimpipe.data.corpus import open_corpus
from slimpipe.data.encode import encode_all
from slimpipe.data.indexed import bin_path, idx_path
from slimpipe.data.readers import Batch
from slimpipe.data.tokenizer import train_tokenizer
from slimpipe.data.tokens import Description, description_path, tokenizer_path

TEXTS = [f"Document {i} says that {i} squared is {i * i}.\n" * (1 + i % 7) for i in range(300)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(TEXTS, 300, "texts").save(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A corpus of JSON lines and of text, in several batches."""
    path = tmp_path / "corpus"
    path.mkdir()
    (path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (path / "b.txt").write_text("".join(TEXTS))
    (path / "c.txt").write_text("short")
    return path


def test_the_same_bytes_from_any_number_of_processes(
    folder: Path, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_BATCH_BYTES", 1000)
    monkeypatch.setattr(readers, "_PIECE_CHARACTERS", 1500)
    corpora = [open_corpus(str(folder)), open_corpus(str(folder / "c.txt"))]
    for processes in (1, 2, 3):
        build_tokens(corpora, saved, tmp_path / str(processes), "text", processes=processes, progress=False)
    files = [bin_path(tmp_path / "1").read_bytes(), idx_path(tmp_path / "1").read_bytes()]
    for name in "23":
        assert [bin_path(tmp_path / name).read_bytes(), idx_path(tmp_path / name).read_bytes()] == files
    # And they are the documents, in order, each with an end of text.
    tokens, tokenizer = TokenFile.open(tmp_path / "1"), load_tokenizer(saved)
    tokens.verify()
    dataset = tokens.dataset
    found = [dataset.document(number).tolist() for number in range(dataset.documents)]
    assert [tokenizer.decode(ids[:-1]) for ids in found] == [*TEXTS, "".join(TEXTS), "short", "short"]
    assert {ids[-1] for ids in found} == {tokenizer.end_of_text}


def test_without_an_end_of_text(folder: Path, saved: Path, tmp_path: Path) -> None:
    description = build_tokens(
        [open_corpus(str(folder))],
        saved,
        tmp_path / "x",
        "text",
        end_of_text=False,
        progress=False,
        keep_tokenizer=True,
    )
    tokens, tokenizer = TokenFile.open(tmp_path / "x"), load_tokenizer(tokenizer_path(tmp_path / "x"))
    assert description.end_of_text is None
    assert tokenizer.end_of_text not in tokens.tokens
    assert tokenizer.decode(tokens.dataset.document(7).tolist()) == TEXTS[7]
    assert tokens.description == description and description.tokenizer == tokenizer.digest


@pytest.mark.parametrize("processes", [1, 2])
def test_a_bad_line_stops_the_build_and_leaves_nothing(processes: int, saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' * 40 + '{"body": "no"}\n' + '{"text": "fine"}\n' * 40)
    with pytest.raises(DataError, match=r"^\S*a.jsonl:41: no key text, but body; name the one that has the text"):
        build_tokens([open_corpus(str(path))], saved, tmp_path / "x", "text", processes=processes, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_failed_build_leaves_the_old_file(folder: Path, saved: Path, tmp_path: Path) -> None:
    corpus = open_corpus(str(folder))
    build_tokens([corpus], saved, tmp_path / "x", "text", progress=False)
    fingerprint = TokenFile.open(tmp_path / "x").fingerprint
    (folder / "a.jsonl").write_text("no JSON")
    with pytest.raises(DataError, match="a.jsonl:1: not JSON"):
        build_tokens([corpus], saved, tmp_path / "x", "text", progress=False)
    assert TokenFile.open(tmp_path / "x").fingerprint == fingerprint


def test_a_build_that_stops_before_its_description(
    folder: Path, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an older file was: its description must not pass for that of the new tokens."""
    build_tokens([open_corpus(str(folder))], saved, tmp_path / "x", "text", progress=False)
    (folder / "d.txt").write_text("more")

    def fail(*_: object) -> None:
        raise OSError("the power fails")

    monkeypatch.setattr(Description, "write", fail)
    with pytest.raises(DataError, match=r"x.json: cannot be written \(the power fails\)"):
        build_tokens([open_corpus(str(folder))], saved, tmp_path / "x", "text", progress=False)
    with pytest.raises(DataError, match=r"x.bin: not the tokens that x.json describes: .*; build it again"):
        TokenFile.open(tmp_path / "x")


def test_nothing_to_encode(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": ""}\n\n')
    with pytest.raises(DataError, match=r"a.jsonl: has no text; \S*x.bin is not written"):
        build_tokens([open_corpus(str(path))], saved, tmp_path / "x", "text", progress=False)
    assert not bin_path(tmp_path / "x").exists()


def test_a_process_that_dies_is_told_with_the_place(saved: Path) -> None:
    """They are killed while batches are handed out, as the system does where memory runs out."""
    import multiprocessing

    others = {child.pid for child in multiprocessing.active_children()}  # of other tests

    def encoders() -> list[Any]:
        return [child for child in multiprocessing.active_children() if child.pid not in others]

    def batches() -> Iterator[Batch]:
        for number in range(40):
            if number == 10:
                for child in encoders():
                    child.kill()
            yield Batch("a.txt", number + 1, None, ["some text"], [True])

    tokenizer = load_tokenizer(saved)
    with pytest.raises(
        DataError, match=r"^a.txt:\d+: a process that encoded this, or text soon after, died .*--processes"
    ):
        list(encode_all(batches(), tokenizer, "uint16", True, 2, str(saved)))
    assert not encoders()


SLOW_BUILD = """\
import itertools, sys, time
from pathlib import Path
from slimpipe.data import build, corpus, readers

def slow(path, key):
    for number in itertools.count(1):
        yield readers.Batch(str(path), number, 'text', [b'{{"text": "some text"}}'], [], 20)
        time.sleep(0.01)

if __name__ == "__main__":
    corpus.reader_of = lambda path: slow
    build.build_tokens([corpus.open_corpus({corpus!r})], Path({saved!r}), Path({prefix!r}), "text", processes=2)
"""


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_build(end: signal.Signals, saved: Path, tmp_path: Path) -> None:
    """Stopped in the middle, a build leaves no token file, and no process of its own."""
    (tmp_path / "a.jsonl").write_text("{}")
    prefix = tmp_path / "x"
    script = tmp_path / "build.py"
    script.write_text(SLOW_BUILD.format(corpus=str(tmp_path / "a.jsonl"), saved=str(saved), prefix=str(prefix)))
    builder = subprocess.Popen(
        [sys.executable, str(script)], stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.getcwd()}
    )
    unfinished = tmp_path / ".x.bin.unfinished"
    try:
        while not (unfinished.exists() and unfinished.stat().st_size):
            assert builder.poll() is None, builder.communicate()
            time.sleep(0.05)
        children = Path(f"/proc/{builder.pid}/task/{builder.pid}/children").read_text().split()
        assert len(children) >= 2
        builder.send_signal(end)
        builder.communicate(timeout=180)
    finally:
        builder.kill()
    assert builder.returncode != 0
    while any(Path(f"/proc/{child}").exists() for child in children):
        time.sleep(0.05)  # the test's own time limit ends this
    assert not bin_path(prefix).exists() and not idx_path(prefix).exists() and not description_path(prefix).exists()
    with pytest.raises(DataError, match="x.idx: cannot be read"):
        TokenFile.open(prefix)
    # What it left is in nobody's way.
    (tmp_path / "b.txt").write_text("some text")
    build_tokens([open_corpus(str(tmp_path / "b.txt"))], saved, prefix, "text", progress=False)
    assert TokenFile.open(prefix).count > 1 and not unfinished.exists()


def test_progress_goes_to_stderr(folder: Path, saved: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    build_tokens([open_corpus(str(folder))], saved, tmp_path / "x", "text")
    out, err = capfd.readouterr()
    assert out == ""
    assert "encoding 0.1 MB of text" in err and "100%" in err


def test_processes_do_without_torch() -> None:
    """Each would need a second and 200 MB more."""
    code = "import sys, slimpipe.data.encode, slimpipe.cli; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_tokens_of_a_large_vocabulary(tmp_path: Path) -> None:
    """Above 65,499 tokens they take four bytes, as megatron-core has it."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<eos>": 0, "[UNK]": 1, "high": 70_000}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    TextTokenizer(tokenizer, "<eos>").save(tmp_path / "tokenizer")
    (tmp_path / "a.txt").write_text("high low high")
    build_tokens([open_corpus(str(tmp_path / "a.txt"))], tmp_path / "tokenizer", tmp_path / "x", "text", progress=False)
    tokens = TokenFile.open(tmp_path / "x")
    assert tokens.tokens.tolist() == [70_000, 1, 70_000, 0] and tokens.tokens.dtype.name == "int32"
    assert tokens.description is not None and tokens.description.vocab_size == 70_001
