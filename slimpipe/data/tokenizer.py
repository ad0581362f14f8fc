"""Byte-level byte-pair encoding (BPE): every text encodes, and decodes to itself."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from slimpipe.data.errors import DataError

END_OF_TEXT = "<|endoftext|>"
# 256 bytes and the end of text.
SMALLEST_VOCABULARY = 257
LARGEST_VOCABULARY = 2**24


class BytePairTokenizer:
    """A trained tokenizer. `END_OF_TEXT` stands between documents; text that spells it out encodes to it as well."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        end_of_text = tokenizer.token_to_id(END_OF_TEXT)
        if end_of_text is None:
            raise DataError(f"the tokenizer has no {END_OF_TEXT} token")
        self.end_of_text: int = end_of_text
        self.vocab_size: int = tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; nothing is added before or after."""
        return list(self._tokenizer.encode(text).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, on all cores."""
        with _on_all_cores():
            return [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`. Where they cut a character in two, its bytes show as U+FFFD."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def save(self, path: Path) -> None:
        """Writes tokenizer.json at once: a reader sees the whole file or none."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_text(self._tokenizer.to_str(), encoding="utf-8")
        os.replace(temporary, path)


def train_tokenizer(texts: Iterable[str], vocab_size: int, corpus: str) -> BytePairTokenizer:
    """A tokenizer of exactly `vocab_size` tokens. Raises DataError if `texts` (named `corpus`) have not that many.

    The same texts give the same tokenizer, on any number of threads.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise DataError(
            f"model.vocab_size = {vocab_size}: a byte-level tokenizer has at least {SMALLEST_VOCABULARY} tokens "
            f"(256 bytes and {END_OF_TEXT}); use {SMALLEST_VOCABULARY} or more"
        )
    if vocab_size > LARGEST_VOCABULARY:
        raise DataError(
            f"model.vocab_size = {vocab_size}: more than {LARGEST_VOCABULARY}; no corpus fills it; use less"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with _on_all_cores():
        tokenizer.train_from_iterator(texts, trainer)
    if (reached := tokenizer.get_vocab_size()) != vocab_size:
        raise DataError(
            f"model.vocab_size = {vocab_size}: data.corpus = {corpus} has text for {reached} tokens only; "
            f"use a larger corpus, or model.vocab_size of at most {reached}"
        )
    return BytePairTokenizer(tokenizer)


def load_tokenizer(path: Path | str) -> BytePairTokenizer:
    """The tokenizer saved at `path` (a tokenizer.json). Raises DataError if it cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the tokenizer {path}: {error}") from error
    try:
        tokenizer = Tokenizer.from_str(text)
    # The bindings raise plain Exception.
    except Exception as error:
        raise DataError(f"{path} is not a tokenizer: {error}") from error
    return BytePairTokenizer(tokenizer)


@contextmanager
def _on_all_cores() -> Iterator[None]:
    """Lets `tokenizers` use threads inside, and none afterwards unless the user's environment says otherwise.

    Its only switch is this variable. Left unset, a fork after the use of threads (a data worker, a subprocess) prints a
    warning; left on, it can deadlock.
    """
    variable = "TOKENIZERS_PARALLELISM"
    chosen = os.environ.get(variable)
    os.environ[variable] = chosen or "true"
    try:
        yield
    finally:
        os.environ[variable] = chosen or "false"
