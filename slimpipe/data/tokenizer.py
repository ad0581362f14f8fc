"""Tokenizers: one of a Hugging Face `tokenizer.json` on disk, or byte-level byte-pair encoding learnt from the corpus.

Nothing is ever fetched from a network.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from slimpipe.data.errors import DataError

END_OF_TEXT = "<|endoftext|>"
# 256 bytes and the end of text.
SMALLEST_VOCABULARY = 257
LARGEST_VOCABULARY = 2**24

# What models call the token between documents, where no tokenizer_config.json says it.
_KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
# A model's name on Hugging Face's hub, its owner's in front or, of its oldest models, not.
_MODEL_NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*(?<!\.json)", re.ASCII)


class TextTokenizer:
    """Text to token ids and back.

    `end_of_text` is the token between documents; text that spells it out encodes to it as well. `vocab_size` is the
    largest id and one.
    """

    def __init__(self, tokenizer: Tokenizer, end: str = END_OF_TEXT) -> None:
        """Raises DataError if there is no token `end`."""
        self._tokenizer, self._end = tokenizer, end
        end_of_text = tokenizer.token_to_id(end)
        if end_of_text is None:
            raise DataError(f"the tokenizer has no {end} token")
        self.end_of_text: int = end_of_text
        self.vocab_size: int = max(tokenizer.get_vocab().values()) + 1

    @property
    def digest(self) -> str:
        """sha256 of all it consists of."""
        return hashlib.sha256(f"{self._end}\0{self._tokenizer.to_str()}".encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; nothing is added before or after."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, on all cores unless TOKENIZERS_PARALLELISM says otherwise."""
        with _on_all_cores():
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
            return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`. Where they cut a character in two, its bytes show as U+FFFD."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def save(self, folder: Path) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json` into `folder`, as Hugging Face has them, each at once: a
        reader sees the whole file or none."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {"eos_token": self._end, "tokenizer_class": "PreTrainedTokenizerFast"}
        for name, text in (
            ("tokenizer_config.json", json.dumps(config, indent=2) + "\n"),
            ("tokenizer.json", self._tokenizer.to_str()),
        ):
            temporary = folder / f".{name}.{os.getpid()}.unfinished"
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, folder / name)


def train_tokenizer(texts: Iterable[str], vocab_size: int, corpus: str, key: str = "model.vocab_size") -> TextTokenizer:
    """A tokenizer of exactly `vocab_size` tokens. Raises DataError if `texts` (of `corpus`, as messages name it) have
    not that many.

    The same texts give the same tokenizer, on any number of threads.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise DataError(
            f"{key} = {vocab_size}: a byte-level tokenizer has at least {SMALLEST_VOCABULARY} tokens "
            f"(256 bytes and {END_OF_TEXT}); use {SMALLEST_VOCABULARY} or more"
        )
    if vocab_size > LARGEST_VOCABULARY:
        raise DataError(f"{key} = {vocab_size}: more than {LARGEST_VOCABULARY}; no corpus fills it; use less")
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
            f"{key} = {vocab_size}: {corpus} has text for {reached} tokens only; "
            f"use a larger corpus, or {key} of at most {reached}"
        )
    return TextTokenizer(tokenizer)


def load_tokenizer(name: Path | str, end: str | None = None) -> TextTokenizer:
    """The tokenizer `name`: a `tokenizer.json`, a folder that has one, or the name of a model in Hugging Face's cache
    on this machine (`meta-llama/Llama-3.1-8B`, `gpt2`).

    `end` is the token between documents; by default what the `tokenizer_config.json` beside it says, or else a
    well-known one. Raises DataError if it cannot be found, read, or has no such token.
    """
    path = _find(str(name))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read the tokenizer {path} ({reason}); give the path of a tokenizer.json") from error
    try:
        tokenizer = Tokenizer.from_str(text)
    # The bindings raise plain Exception.
    except Exception as error:
        raise DataError(f"{path} is not a tokenizer ({error}); use a tokenizer.json of Hugging Face's form") from error
    known = [end] if end is not None else [*_configured_end(path), *_KNOWN_ENDS]
    found = [token for token in known if tokenizer.token_to_id(token) is not None]
    if not found:
        raise DataError(
            f"{path}: has no {' or '.join(known)} token to stand between documents; name another of its tokens "
            "(data.end_of_text, --end-of-text)"
        )
    return TextTokenizer(tokenizer, found[0])


def _find(name: str) -> Path:
    """The tokenizer.json of `name`: a file's or folder's before a model's. Where there is nothing of that name, the
    path as given."""
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "tokenizer.json").exists():
            raise DataError(
                f"{path}: has no tokenizer.json; save the tokenizer in that form (transformers: use_fast=True)"
            )
        return path / "tokenizer.json"
    if path.exists() or not _MODEL_NAME.fullmatch(name):
        return path
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    repository = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / f"models--{name.replace('/', '--')}"
    main = repository / "refs" / "main"
    cached = repository / "snapshots" / (main.read_text().strip() if main.exists() else "") / "tokenizer.json"
    if not cached.is_file():
        raise DataError(
            f"{name}: neither a file or folder, nor a model in Hugging Face's cache ({cached}); slimpipe fetches "
            "nothing: "
            f"give the path of a tokenizer.json, or first run: hf download {name} tokenizer.json tokenizer_config.json"
        )
    return cached


def _configured_end(path: Path) -> list[str]:
    """The token that the configuration beside a tokenizer.json names, if it does."""
    try:
        token = json.loads((path.parent / "tokenizer_config.json").read_text(encoding="utf-8"))["eos_token"]
        return [token["content"] if isinstance(token, dict) else str(token)]
    except (OSError, ValueError, KeyError, TypeError):
        return []


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
