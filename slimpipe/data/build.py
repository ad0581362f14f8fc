"""Builds a token file from a corpus."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from slimpipe.data.corpus import Corpus
from slimpipe.data.encode import encode_all
from slimpipe.data.errors import DataError
from slimpipe.data.indexed import IndexedWriter, bin_path, smallest_dtype, writing
from slimpipe.data.readers import Batch
from slimpipe.data.tokenizer import load_tokenizer, train_tokenizer
from slimpipe.data.tokens import Description, description_path, pair_fingerprint, tokenizer_path

# Merges are learnt from this much text; more changes the vocabulary little and costs time.
_TRAINING_BYTES = 16_000_000


def build_tokens(
    corpora: Sequence[Corpus],
    tokenizer_folder: Path,
    prefix: Path,
    text_key: str,
    end_of_text: bool = True,
    processes: int = 1,
    progress: bool = True,
    keep_tokenizer: bool = False,
) -> Description:
    """Writes the token file `prefix` of all `corpora` in turn, with the tokenizer saved in `tokenizer_folder`.

    The same text gives the same bytes, whatever `processes`. The file appears whole or not at all. With `end_of_text`
    that token stands behind each document. `progress` shows itself on stderr.

    Raises DataError for text that cannot be read, naming file and line, and where there is none.
    """
    tokenizer = load_tokenizer(tokenizer_folder)
    dtype = smallest_dtype(tokenizer.vocab_size)
    size = sum(corpus.size for corpus in corpora)
    name = ", ".join(corpus.name for corpus in corpora)
    batches = (batch for corpus in corpora for batch in corpus.batches(text_key))
    with IndexedWriter(prefix, dtype) as writer, _display(progress) as display:
        bar = display.add_task(f"data: encoding {size / 1e6:.1f} MB of text", total=size)
        for encoded in encode_all(batches, tokenizer, dtype, end_of_text, processes, str(tokenizer_folder)):
            start = 0
            for end in encoded.ends:
                writer.append(encoded.tokens[start:end])
                writer.end_document()
                start = end
            writer.append(encoded.tokens[start:])
            display.advance(bar, encoded.size)
        display.update(bar, completed=size)
        if not writer.count:
            raise DataError(f"{name}: has no text; {bin_path(prefix)} is not written")
    if keep_tokenizer:
        with writing(tokenizer_path(prefix)):
            tokenizer.save(tokenizer_path(prefix))
    description = Description(
        source=name,
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text if end_of_text else None,
        tokenizer=tokenizer.digest,
        fingerprint=pair_fingerprint(prefix),
        sha256=writer.sha256,
    )
    with writing(description_path(prefix)):
        description.write(prefix)
    return description


def learn_tokenizer(
    corpora: Sequence[Corpus],
    vocab_size: int,
    folder: Path,
    text_key: str,
    where: str,
    key: str = "model.vocab_size",
    progress: bool = True,
) -> None:
    """Saves a tokenizer of exactly `vocab_size` tokens, learnt from `corpora` (which messages call `where`), in
    `folder`.

    Raises DataError if there is not text enough for as many.
    """
    with _display(progress) as display:
        bar = display.add_task(f"data: learning {vocab_size} tokens", total=None)
        tokenizer = train_tokenizer(_sample(corpora, text_key), vocab_size, where, key)
        display.update(bar, total=1, completed=1)
    tokenizer.save(folder)


def processes_for(corpora: Sequence[Corpus]) -> int:
    """How many processes are worth their start: one a core, and none for less than 8 MB."""
    return max(1, min(len(os.sched_getaffinity(0)), sum(corpus.size for corpus in corpora) // 8_000_000))


def _sample(corpora: Sequence[Corpus], text_key: str) -> Iterator[str]:
    """Text to learn the merges from: all of it, or parts evenly spread over a large corpus."""
    stride = -(-sum(corpus.size for corpus in corpora) // _TRAINING_BYTES)
    batches: Iterable[Batch] = itertools.chain.from_iterable(corpus.batches(text_key) for corpus in corpora)
    for batch in itertools.islice(batches, 0, None, stride):
        yield from (text for text, _ in batch.pieces())


def _display(shown: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not shown)
