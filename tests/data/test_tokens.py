"""Token files: round trips, and a clear error for whatever can be wrong with one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slimpipe.data import DataError, TokenFile
from slimpipe.data.tokens import TokenWriter, sidecar_path


def write(path: Path, ids: list[int], vocab_size: int = 1000) -> Path:
    with TokenWriter(path, vocab_size, "a corpus") as writer:
        for start in range(0, len(ids), 7):
            writer.append(ids[start : start + 7])
    return path


@pytest.mark.parametrize(("vocab_size", "dtype"), [(300, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_round_trip(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    ids = [0, 1, vocab_size - 1, *range(200)]
    file = TokenFile.open(write(tmp_path / "tokens.bin", ids, vocab_size))
    assert file.tokens.tolist() == ids and file.count == len(ids)
    assert file.tokens.dtype == np.dtype(dtype).newbyteorder("<")
    assert isinstance(file.tokens, np.memmap)
    assert (file.vocab_size, file.source) == (vocab_size, "a corpus")
    file.verify()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokens.bin", "tokens.json"]


def test_fingerprint_is_of_the_tokens(tmp_path: Path) -> None:
    one, same, other = (
        TokenFile.open(write(tmp_path / f"{name}.bin", ids)).fingerprint
        for name, ids in {"one": [1, 2, 3], "same": [1, 2, 3], "other": [1, 3, 2]}.items()
    )
    assert one == same != other


def test_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    for ids in ([3, 1000], [-1]):
        with pytest.raises(DataError, match="do not fit a vocabulary of 1000"):
            write(tmp_path / "tokens.bin", ids)
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = write(tmp_path / "tokens.bin", [1, 2, 3])
    with pytest.raises(KeyboardInterrupt), TokenWriter(path, 1000, "a corpus") as writer:
        writer.append([4])
        raise KeyboardInterrupt
    assert TokenFile.open(path).tokens.tolist() == [1, 2, 3]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_reader_keeps_its_tokens_while_they_are_written_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "tokens.bin", [1, 2, 3])
    reader = TokenFile.open(path)
    write(path, [9, 9])
    assert reader.tokens.tolist() == [1, 2, 3]
    assert TokenFile.open(path).tokens.tolist() == [9, 9]


def test_a_write_that_stops_between_the_two_files_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "tokens.bin", [1, 2, 3])
    replace = os.replace

    def replace_tokens_only(source: Any, target: Any) -> None:
        if Path(target).suffix == ".json":
            raise OSError("the power fails")
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_tokens_only)
    with pytest.raises(OSError, match="power"):
        write(path, [7, 8, 9])  # as many as before: a stale description would fit
    with pytest.raises(DataError, match="cannot read"):
        TokenFile.open(path)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*tokens.json, the description of tokens.bin: No such file"):
        TokenFile.open(tmp_path / "tokens.bin")
    path = write(tmp_path / "tokens.bin", [1, 2, 3])
    path.unlink()
    with pytest.raises(DataError, match=r"cannot read the token file .*tokens.bin: No such file"):
        TokenFile.open(path)


def test_cut_and_overlong_files(tmp_path: Path) -> None:
    path = write(tmp_path / "tokens.bin", [1, 2, 3])
    for contents in (b"", b"\0\0\0\0", b"\0\0\0\0\0", b"\0" * 8):
        path.write_bytes(contents)
        with pytest.raises(
            DataError, match=rf"has {len(contents)} bytes, but tokens.json says 3 tokens of 2 bytes \(6"
        ):
            TokenFile.open(path)


def test_changed_contents(tmp_path: Path) -> None:
    path = write(tmp_path / "tokens.bin", [1, 2, 3])
    path.write_bytes(b"\1\0\2\0\4\0")
    with pytest.raises(DataError, match="do not match its sha256"):
        TokenFile.open(path).verify()


@pytest.mark.parametrize(
    "change",
    [{"dtype": "float16"}, {"dtype": None}, {"count": "many"}, {"count": None}, {"sha256": None}, "[1]", "{", ""],
)
def test_malformed_description(tmp_path: Path, change: dict[str, Any] | str) -> None:
    path = write(tmp_path / "tokens.bin", [1, 2, 3])
    if isinstance(change, str):
        sidecar_path(path).write_text(change)
    else:
        description = {**json.loads(sidecar_path(path).read_text()), **change}
        sidecar_path(path).write_text(json.dumps({k: v for k, v in description.items() if v is not None}))
    with pytest.raises(DataError, match="does not describe a token file.*delete it"):
        TokenFile.open(path)


def test_an_empty_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="0 tokens"):
        TokenFile.open(write(tmp_path / "tokens.bin", []))
