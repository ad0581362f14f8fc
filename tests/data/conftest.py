"""A corpus, a tokenizer and a token file, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from slimpipe.data import PreparedData, prepare

# A part of the library is as good a test as the whole, in a third of the time.
STDLIB_BYTES = 3_000_000


@pytest.fixture(scope="session")
def stdlib(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    """The first `STDLIB_BYTES` of `python_stdlib`, with a small vocabulary."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slimpipe.data.corpus._STDLIB_BYTES", STDLIB_BYTES)
        return prepare("python_stdlib", 512, tmp_path_factory.mktemp("cache"), progress=False)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """A text of some 30 KB with words enough for a few hundred tokens."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"The square of {i} is {i * i}, and its cube is {i**3:,}.\n" for i in range(600)))
    return path
