"""Builds a corpus's tokenizer and token file once, into a cache, whatever the number of processes that ask."""

from __future__ import annotations

import hashlib
import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from slimpipe.data.corpus import Corpus, open_corpus
from slimpipe.data.errors import DataError
from slimpipe.data.tokenizer import BytePairTokenizer, load_tokenizer, train_tokenizer
from slimpipe.data.tokens import TokenFile, TokenWriter, sidecar_path

# Part of the cache's key: raise it when the same corpus would give other tokens.
_FORMAT = 1
# Merges are learnt from this much text; more changes the vocabulary little and costs time.
_TRAINING_CHARACTERS = 16_000_000
# Texts encoded at a time: enough for the threads, few enough for a moving progress bar.
_BATCH = 64


@dataclass(frozen=True)
class PreparedData:
    """What `prepare` made or found. `fingerprint` is the sha256 of the tokens."""

    tokens_path: Path
    tokenizer_path: Path
    count: int
    fingerprint: str


def prepare(corpus: str, vocab_size: int, cache_dir: Path, progress: bool = True) -> PreparedData:
    """The token file and tokenizer of `corpus` (`python_stdlib` or a path), built into `cache_dir` if not there yet.

    The cache's key covers the corpus's name and contents, the vocabulary and, for `python_stdlib`, the interpreter's
    version. Of several processes one builds and the others wait; a damaged cache is built again. `progress` shows
    progress on stderr: let one process of a node have it.

    Raises DataError if the corpus cannot be read or has not text enough for the vocabulary.
    """
    source = open_corpus(corpus)
    label = re.sub(r"[^A-Za-z0-9_-]+", "_", Path(corpus).stem)[:40]
    key = hashlib.sha256(f"{_FORMAT}\0{corpus}\0{vocab_size}\0{source.digest}".encode()).hexdigest()[:16]
    folder = cache_dir.expanduser() / f"{label}-v{vocab_size}-{key}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot create the data cache {folder}: {error.strerror}") from error

    if (prepared := _find(folder, vocab_size)) is not None:
        return prepared
    # flock: released by the system should the builder die.
    lock = FileLock(folder / "build.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if progress:
            print(f"data: another process is preparing {corpus}; waiting for it", file=sys.stderr)
        lock.acquire()
    try:
        # Built while this process waited?
        if (prepared := _find(folder, vocab_size)) is None:
            _build(source, vocab_size, folder, progress)
            prepared = _find(folder, vocab_size)
    finally:
        lock.release()
    if prepared is None:
        raise DataError(f"the data cache {folder} changes while it is read; is something else writing there?")
    return prepared


def _tokens_path(folder: Path) -> Path:
    return folder / "tokens.bin"


def _tokenizer_path(folder: Path) -> Path:
    return folder / "tokenizer.json"


def _find(folder: Path, vocab_size: int) -> PreparedData | None:
    """What lies in `folder`, or None if that is nothing, half of it, or damaged."""
    if not sidecar_path(_tokens_path(folder)).exists():
        return None
    try:
        tokens = TokenFile.open(_tokens_path(folder))
        tokens.verify()
        if tokens.vocab_size != vocab_size or load_tokenizer(_tokenizer_path(folder)).vocab_size != vocab_size:
            return None
    # A cache is there to be made again: no reason to stop the run.
    except DataError:
        return None
    return PreparedData(tokens.path, _tokenizer_path(folder), tokens.count, tokens.fingerprint)


def _build(corpus: Corpus, vocab_size: int, folder: Path, progress: bool) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not progress) as display:
        training = display.add_task(f"data: learning {vocab_size} tokens", total=None)
        tokenizer = train_tokenizer(_sample(corpus), vocab_size, corpus.name)
        display.update(training, total=1, completed=1)
        tokenizer.save(_tokenizer_path(folder))

        encoding = display.add_task(f"data: encoding {corpus.size / 1e6:.1f} MB of text", total=corpus.size)
        with TokenWriter(_tokens_path(folder), vocab_size, corpus.name) as writer:
            for tokens, size in _encode(corpus, tokenizer):
                writer.append(tokens)
                display.advance(encoding, size)
        display.update(encoding, completed=corpus.size)


def _sample(corpus: Corpus) -> Iterator[str]:
    """Text to learn the merges from: all of it, or pieces evenly spread over a large corpus."""
    stride = -(-corpus.size // _TRAINING_CHARACTERS)
    return (text for text, _ in itertools.islice(corpus.pieces(), 0, None, stride))


def _encode(corpus: Corpus, tokenizer: BytePairTokenizer) -> Iterator[tuple[list[int], int]]:
    """Tokens of the corpus with an end of text after each document, and the number of characters they came from."""
    pieces = corpus.pieces()
    while batch := list(itertools.islice(pieces, _BATCH)):
        for (text, ends), ids in zip(batch, tokenizer.encode_batch([text for text, _ in batch]), strict=True):
            yield [*ids, tokenizer.end_of_text] if ends else ids, len(text)
