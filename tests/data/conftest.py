"""A corpus, a tokenizer and a token file, made once; and token files of given tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from slimpipe.config import DataConfig
from slimpipe.data import IndexedWriter, Part, RunData, TokenFile, open_data

# A part of the library is as good a test as the whole, in a third of the time.
STDLIB_BYTES = 3_000_000


@pytest.fixture(scope="session")
def stdlib(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    """The first `STDLIB_BYTES` of `python_stdlib`, with a vocabulary of 512 tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slimpipe.data.corpus._STDLIB_BYTES", STDLIB_BYTES)
        cache = str(tmp_path_factory.mktemp("cache"))
        settings = DataConfig(corpus="python_stdlib", sequence_length=64, cache_dir=cache)
        return open_data(settings, 512, seed=0, progress=False)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """A text of some 30 KB with words enough for a few hundred tokens."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"The square of {i} is {i * i}, and its cube is {i**3:,}.\n" for i in range(600)))
    return path


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., RunData]:
    """`opened(corpus=..., vocab_size=...)`: the data of these settings, in a cache of the test's own."""

    def open_these(vocab_size: int = 300, **settings: Any) -> RunData:
        values = {"sequence_length": 32, "cache_dir": str(tmp_path / "cache"), **settings}
        return open_data(DataConfig(**values), vocab_size, seed=0, progress=False)

    return open_these


def write_pair(prefix: Path, documents: Iterable[Iterable[int]], dtype: str = "uint16") -> Path:
    """A pair with one sequence a document. Returns its prefix."""
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.append(list(document))
            writer.end_document()
    return prefix


def whole(prefix: Path, weight: float = 1.0, key: str = "data.corpus", source: str = "a_corpus") -> Part:
    """All of a token file."""
    tokens = TokenFile.open(prefix)
    return Part(key, source, tokens, 0, tokens.count, weight)
