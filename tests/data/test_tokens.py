"""Token files: what stands beside a Megatron pair, and that a reader notices what does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slimpipe.data import DataError, TokenFile, fingerprint
from slimpipe.data.indexed import bin_path
from slimpipe.data.tokens import Description, description_path, pair_fingerprint
from tests.data.conftest import write_pair


def described(prefix: Path, ids: list[int], sha256: str = "0") -> Path:
    write_pair(prefix, [ids])
    Description("a corpus", 1000, 0, "t", pair_fingerprint(prefix), sha256).write(prefix)
    return prefix


def test_round_trip(tmp_path: Path) -> None:
    prefix = described(tmp_path / "a.b", [0, 1, 999])
    for name in ("a.b", "a.b.bin", "a.b.idx"):
        file = TokenFile.open(tmp_path / name)
        assert file.tokens.tolist() == [0, 1, 999] and file.count == 3 and file.prefix == prefix
        assert isinstance(file.tokens, np.memmap)
        assert file.description is not None and file.description.vocab_size == 1000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.b.bin", "a.b.idx", "a.b.json"]


def test_fingerprint_is_of_the_tokens(tmp_path: Path) -> None:
    one, same, other, cut = (
        TokenFile.open(write_pair(tmp_path / name, documents)).fingerprint
        for name, documents in {
            "one": [[1, 2, 3]], "same": [[1, 2, 3]], "other": [[1, 3, 2]], "cut": [[1], [2, 3]],
        }.items()
    )  # fmt: skip
    assert one == same and len({one, other, cut}) == 3


def test_fingerprint_of_a_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of it, evenly spread, first and last among them; and its size."""
    monkeypatch.setattr(fingerprint, "_WHOLE", 64)
    monkeypatch.setattr(fingerprint, "_BLOCK", 16)
    path = tmp_path / "file"
    data = bytearray(1000)
    path.write_bytes(data)
    first = fingerprint.fingerprint(path)
    noticed = []
    for place in range(0, 1000):
        data[place] = 1
        path.write_bytes(data)
        noticed.append(fingerprint.fingerprint(path) != first)
        data[place] = 0
    starts = [0, 328, 656, 984]
    assert [i for i, seen in enumerate(noticed) if seen] == [s + i for s in starts for i in range(16)]
    path.write_bytes(data + b"\0")
    assert fingerprint.fingerprint(path) != first


def test_other_tokens_than_described(tmp_path: Path) -> None:
    prefix = described(tmp_path / "x", [1, 2, 3])
    bin_path(prefix).write_bytes(b"\1\0\2\0\4\0")
    with pytest.raises(DataError, match=r"x.bin: not the tokens that x.json describes: .*; build it again, or delete"):
        TokenFile.open(prefix)
    description_path(prefix).unlink()
    assert TokenFile.open(prefix).tokens.tolist() == [1, 2, 4]


def test_verify(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="do not match its sha256"):
        TokenFile.open(described(tmp_path / "x", [1, 2, 3])).verify()
    with pytest.raises(DataError, match=r"has no y.json to be verified against"):
        TokenFile.open(write_pair(tmp_path / "y", [[1]])).verify()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_numbers_that_are_no_tokens(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(
        DataError, match=f"x.bin: holds numbers of type {dtype}, no tokens; use a pair of an integer type"
    ):
        TokenFile.open(write_pair(tmp_path / "x", [[1, 2]], dtype))


@pytest.mark.parametrize(
    "change", [{"vocab_size": "many"}, {"source": ...}, {"fingerprint": ...}, {"end_of_text": "x"}, "[1]", "{", ""]
)
def test_malformed_description(tmp_path: Path, change: dict[str, Any] | str) -> None:
    path = description_path(described(tmp_path / "x", [1, 2, 3]))
    if isinstance(change, str):
        path.write_text(change)
    else:
        description = {**json.loads(path.read_text()), **change}
        path.write_text(json.dumps({k: v for k, v in description.items() if v is not ...}))
    with pytest.raises(DataError, match=r"x.json: does not describe a token file.*build it again"):
        TokenFile.open(tmp_path / "x")


def test_unreadable(tmp_path: Path, opened: Callable[..., Any]) -> None:
    with pytest.raises(DataError, match=r"^data.corpus = .*x.bin: .*x.idx: cannot be read \(No such file"):
        opened(corpus=str(tmp_path / "x.bin"))
