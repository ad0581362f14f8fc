"""The tokenizer: exact size, exact round trips, the same on every run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimpipe.data import END_OF_TEXT, DataError, RunData, TextTokenizer, load_tokenizer
from slimpipe.data.tokenizer import train_tokenizer

TEXTS = [f"def square_{i}(x):\n    return x * {i}\n" for i in range(300)]


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return train_tokenizer(TEXTS, 300, "texts")


@pytest.mark.parametrize("vocab_size", [257, 258, 300])
def test_exact_size(vocab_size: int) -> None:
    trained = train_tokenizer(TEXTS, vocab_size, "texts")
    assert trained.vocab_size == vocab_size
    assert 0 <= trained.end_of_text < vocab_size
    assert max(trained.encode(TEXTS[0])) < vocab_size


@given(st.text())
def test_every_text_round_trips(tokenizer: TextTokenizer, text: str) -> None:
    # Surrogates are not text: UTF-8 has no bytes for them.
    text = text.encode("utf-8", errors="ignore").decode("utf-8")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_real_text_round_trips(stdlib: RunData) -> None:
    tokenizer = stdlib.tokenizer
    assert tokenizer is not None
    text = Path(os.__file__).read_text(encoding="utf-8")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text) / 1.8  # it compresses
    assert tokenizer.encode_batch([text[:1000], "", text[1000:2000]]) == [
        tokenizer.encode(text[:1000]),
        [],
        tokenizer.encode(text[1000:2000]),
    ]


def test_end_of_text(tokenizer: TextTokenizer) -> None:
    assert tokenizer.encode(END_OF_TEXT) == [tokenizer.end_of_text]
    assert tokenizer.encode("x" + END_OF_TEXT)[-1] == tokenizer.end_of_text
    assert tokenizer.end_of_text not in tokenizer.encode("<|endoftext| >")
    assert tokenizer.decode([tokenizer.end_of_text]) == END_OF_TEXT


def test_saving(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "one")
    for name in ("one", "one/tokenizer.json"):
        loaded = load_tokenizer(tmp_path / name)
        assert loaded.encode(TEXTS[7]) == tokenizer.encode(TEXTS[7])
        assert (loaded.digest, loaded.end_of_text) == (tokenizer.digest, tokenizer.end_of_text)
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    train_tokenizer(TEXTS, 300, "texts").save(tmp_path / "two")
    assert (tmp_path / "two/tokenizer.json").read_bytes() == (tmp_path / "one/tokenizer.json").read_bytes()


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"model.vocab_size = 256: .* at least 257"):
        train_tokenizer(TEXTS, 256, "texts")
    with pytest.raises(DataError, match=r"model.vocab_size = 5000: texts has text for \d+ tokens only"):
        train_tokenizer(TEXTS, 5000, "texts")
    with pytest.raises(DataError, match="cannot read the tokenizer"):
        load_tokenizer(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text('{"version": ')
    with pytest.raises(DataError, match="is not a tokenizer"):
        load_tokenizer(tmp_path / "bad.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot read the tokenizer"):
        load_tokenizer(tmp_path / "binary.json")


@pytest.mark.parametrize("chosen", [None, "false", "true"])
def test_quiet_over_forks_and_leaves_the_users_choice(chosen: str | None) -> None:
    """`tokenizers` warns at a fork after threads were used, unless its variable is set."""
    code = (
        "import os; from slimpipe.data.tokenizer import train_tokenizer\n"
        "t = train_tokenizer([f'text {i} ' * 9 for i in range(99)], 260, 'c'); t.encode_batch(['a b c'] * 99)\n"
        "pid = os.fork()\n"
        "if pid == 0: t.encode_batch(['a b c'] * 99); os._exit(0)\n"
        "print(os.environ['TOKENIZERS_PARALLELISM'], os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
    if chosen is not None:
        environment["TOKENIZERS_PARALLELISM"] = chosen
    if chosen == "true":
        code = code.replace("t.encode_batch(['a b c'] * 99); os._exit", "os._exit")  # the user's risk
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=180)
    assert done.stdout.split() == [chosen or "false", "0"]
    assert done.stderr == ""
