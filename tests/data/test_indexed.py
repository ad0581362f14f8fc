"""Megatron's indexed datasets: the same bytes as megatron-core's, both ways, and a clear line for whatever is wrong."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slimpipe.data import DataError, IndexedDataset, IndexedWriter
from slimpipe.data.indexed import bin_path, idx_path, smallest_dtype
from tests.data.conftest import write_pair
from tests.data.megatron import make

WRITTEN = Path(make.__file__).parent

documents_lists = st.lists(st.lists(st.lists(st.integers(0, 127), max_size=9), max_size=4), max_size=8)


def write(prefix: Path, dtype: str, documents: list[list[list[int]]]) -> Path:
    with IndexedWriter(prefix, dtype) as writer:
        for sequences in documents:
            for sequence in sequences:
                writer.append(sequence)
                writer.end_sequence()
            writer.end_document()
    return prefix


def read(path: Path | str) -> list[list[list[Any]]]:
    dataset = IndexedDataset.open(path)
    return [
        [dataset[i].tolist() for i in range(int(dataset.bounds[d]), int(dataset.bounds[d + 1]))]
        for d in range(dataset.documents)
    ]


def both(prefix: Path) -> tuple[bytes, bytes]:
    return bin_path(prefix).read_bytes(), idx_path(prefix).read_bytes()


# ---- beside megatron-core ----


@pytest.mark.parametrize("dtype", make.DTYPES)
def test_reads_what_megatron_core_has_written(dtype: str) -> None:
    assert read(WRITTEN / dtype) == make.DOCUMENTS
    dataset = IndexedDataset.open(WRITTEN / f"{dtype}.bin")
    assert dataset.tokens.dtype == np.dtype(dtype)
    assert [dataset.document(i).tolist() for i in range(5)] == [sum(d, []) for d in make.DOCUMENTS]
    assert dataset.tokens.tolist() == [*range(1, 12), 127, 12]


@pytest.mark.parametrize("dtype", make.DTYPES)
def test_writes_the_bytes_that_megatron_core_has_written(dtype: str, tmp_path: Path) -> None:
    assert both(write(tmp_path / dtype, dtype, make.DOCUMENTS)) == both(WRITTEN / dtype)


@pytest.fixture(scope="module")
def megatron() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("megatron.core.datasets.indexed_dataset", exc_type=ImportError)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(documents_lists, st.sampled_from(make.DTYPES))
def test_live_both_ways(megatron: Any, tmp_path: Path, documents: list[list[list[int]]], dtype: str) -> None:
    """megatron-core as installed reads our tokens, and we read its."""
    ours, theirs = write(tmp_path / "ours", dtype, documents), tmp_path / "theirs"
    make.write(theirs, dtype, documents)
    assert both(ours) == both(theirs)
    if not any(map(any, documents)):
        return  # megatron-core maps the file, and cannot map an empty one
    dataset = megatron.IndexedDataset(str(ours))
    sequences = [sequence for document in documents for sequence in document]
    assert [dataset[i].tolist() for i in range(len(dataset))] == sequences
    assert np.array_equal(dataset.document_indices, np.cumsum([0, *map(len, documents)]))
    assert dataset[0].dtype == np.dtype(dtype)


def test_live_type_by_vocabulary(megatron: Any) -> None:
    for size in (257, 65499, 65500, 65536, 128256):
        assert smallest_dtype(size) == np.dtype(megatron.DType.optimal_dtype(size))


# ---- alone ----


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(documents_lists, st.sampled_from(make.DTYPES))
def test_round_trip(tmp_path: Path, documents: list[list[list[int]]], dtype: str) -> None:
    prefix = write(tmp_path / "x", dtype, documents)
    assert read(prefix) == documents
    # Written anew from what was read, and by documents instead of sequences, the tokens are the same.
    assert both(write(tmp_path / "y", dtype, read(prefix))) == both(prefix)
    flat = [sum(document, []) for document in documents]
    dataset = IndexedDataset.open(write_pair(tmp_path / "z", flat, dtype))
    assert [dataset.document(i).tolist() for i in range(dataset.documents)] == flat
    assert bin_path(tmp_path / "z").read_bytes() == bin_path(prefix).read_bytes()


def test_sequences_longer_than_the_format_allows_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slimpipe.data.indexed._LONGEST", 4)
    prefix = write_pair(tmp_path / "x", [range(11), range(4), range(2)])
    assert read(prefix) == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]], [[0, 1, 2, 3]], [[0, 1]]]


def test_many_sequences_are_checked_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slimpipe.data.indexed._CHUNK", 3)
    prefix = write_pair(tmp_path / "x", [range(i) for i in range(1, 12)])
    assert IndexedDataset.open(prefix).document(10).tolist() == list(range(11))
    change(idx_path(prefix), 34 + 4 * 9, b"\7")
    with pytest.raises(DataError, match="sequence 10 has length 11 at byte 110, but the ones before it end at 104"):
        IndexedDataset.open(prefix)


def test_what_the_type_cannot_hold(tmp_path: Path) -> None:
    for ids in ([3, 65536], [-1]):
        with pytest.raises(DataError, match=r"x.bin: token (65536|-1) does not fit uint16; use a wider type"):
            write_pair(tmp_path / "x", [ids])
    with pytest.raises(DataError, match="token files hold uint8, int8, .*, uint16, not uint32"):
        IndexedWriter(tmp_path / "x", "uint32")
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "x", [[1, 2, 3]])
    with pytest.raises(KeyboardInterrupt), IndexedWriter(prefix, "uint16") as writer:
        writer.append([4])
        raise KeyboardInterrupt
    assert read(prefix) == [[[1, 2, 3]]]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_reader_keeps_its_tokens_while_they_are_written_anew(tmp_path: Path) -> None:
    reader = IndexedDataset.open(write_pair(tmp_path / "x", [[1, 2, 3]]))
    write_pair(tmp_path / "x", [[9, 9]])
    assert reader[0].tolist() == [1, 2, 3] and read(tmp_path / "x") == [[[9, 9]]]


def test_a_write_that_stops_between_the_two_files_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write_pair(tmp_path / "x", [[1, 2, 3]])
    replace = os.replace

    def replace_tokens_only(source: Any, target: Any) -> None:
        if Path(target).suffix == ".idx":
            raise OSError("the power fails")
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_tokens_only)
    with pytest.raises(DataError, match=r"x.bin: cannot be written \(the power fails\)"):
        write_pair(prefix, [[7, 8, 9]])  # as many as before: the old index would fit
    with pytest.raises(DataError, match="x.idx: cannot be read"):
        IndexedDataset.open(prefix)


def test_a_full_disk(tmp_path: Path) -> None:
    """At 4,096 bytes, on account of a limit: while tokens are written, or not before the end."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        for name, tokens in (("at once", 100_000), ("at the end", 3000)):
            message = rf"{name}.bin: cannot be written \(File too large\); make room there, or use another folder"
            with pytest.raises(DataError, match=message):
                write_pair(tmp_path / name, [range(tokens)], "int32")
        with pytest.raises(DataError, match="index.bin: cannot be written"):
            write_pair(tmp_path / "index", [[1]] * 1000, "uint16")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no/x.bin: cannot be written \(No such file or directory\)"):
        write_pair(tmp_path / "no" / "x", [[1]])


def test_two_writers_of_one_file(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "x", "uint16") as writer:
        writer.append([1])
        with (
            pytest.raises(DataError, match="x.bin: another process is writing it; wait"),
            IndexedWriter(tmp_path / "x", "uint16"),
        ):
            pass
    assert read(tmp_path / "x") == [[[1]]]


def test_the_finished_work_of_another_is_not_taken_for_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opened before the other has finished, locked after: the file by then has its final name."""
    first = IndexedWriter(tmp_path / "x", "uint16").__enter__()
    first.append([1, 2])
    lock = fcntl.flock

    def finish_first(file: Any, how: int) -> None:
        first.__exit__(None, None, None)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", finish_first)
    with pytest.raises(DataError, match="another process is writing it"):
        IndexedWriter(tmp_path / "x", "uint16").__enter__()
    assert read(tmp_path / "x") == [[[1, 2]]]


def test_what_an_interrupted_writer_left_is_written_over(tmp_path: Path) -> None:
    (tmp_path / ".x.bin.unfinished").write_bytes(b"long ago")
    assert read(write_pair(tmp_path / "x", [[1]])) == [[[1]]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx"]


def change(path: Path, place: int, new: bytes) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:place] + new + data[place + len(new) :])


BAD = {
    "magic": (".idx", 0, b"X", "x.idx: not the index of a Megatron token file"),
    "version": (".idx", 9, b"\2", "x.idx: version 2 of Megatron's format, only 1 is known"),
    "type": (".idx", 17, b"\x09", "x.idx: unknown type of tokens, code 9; the codes are 1 to 8"),
    "another type": (
        ".idx",
        17,
        b"\x04",
        r"x.idx: sequence 1 has length 2 at byte 6, but the ones before it end at 12",
    ),
    "sequences": (".idx", 18, b"\3", r"x.idx: has 82 bytes, but its head says 3 sequences and 3 document bounds \(94"),
    "bounds": (".idx", 26, b"\0", r"x.idx: has 82 bytes, but its head says 2 sequences and 0 document bounds"),
    "length": (".idx", 34, b"\1", "x.idx: sequence 1 has length 2 at byte 6, but the ones before it end at 2"),
    "negative length": (".idx", 37, b"\xff", "x.idx: sequence 0 has length -16777213"),
    "pointer": (".idx", 42, b"\2", "x.idx: sequence 0 has length 3 at byte 2, but the ones before it end at 0"),
    "first bound": (".idx", 58, b"\1", "x.idx: its document bounds do not rise from 0 to 2"),
    "last bound": (".idx", 74, b"\3", "x.idx: its document bounds do not rise from 0 to 2"),
    "falling bounds": (".idx", 66, b"\2\0\0\0\0\0\0\0\1", "x.idx: its document bounds do not rise"),
}


@pytest.mark.parametrize("damage", BAD)
def test_damage(damage: str, tmp_path: Path) -> None:
    suffix, place, new, message = BAD[damage]
    prefix = write_pair(tmp_path / "x", [[1, 2, 3], [4, 5]])
    change(prefix.with_suffix(suffix), place, new)
    with pytest.raises(DataError, match=f"{message}.*build it again"):
        IndexedDataset.open(prefix)


@pytest.mark.parametrize("size", [0, 1, 8, 9, 33, 34, 40, 81])
def test_a_cut_index(size: int, tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "x", [[1, 2, 3], [4, 5]])
    os.truncate(idx_path(prefix), size)
    with pytest.raises(DataError, match=r"x.idx: (not the index|cut after|has \d+ bytes).*build it again"):
        IndexedDataset.open(prefix)


@pytest.mark.parametrize("size", [0, 9, 12])
def test_cut_or_overlong_tokens(size: int, tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "x", [[1, 2, 3], [4, 5]])
    os.truncate(bin_path(prefix), size)
    with pytest.raises(
        DataError,
        match=rf"x.bin: has {size} bytes, but x.idx says 5 tokens of 2 bytes \(10\): it is cut, or of another",
    ):
        IndexedDataset.open(prefix)


def test_multimodal(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "x", [[1, 2, 3], [4, 5]])
    with idx_path(prefix).open("ab") as file:
        file.write(b"\0\1")
    with pytest.raises(DataError, match="x.idx: has modes, so it is multimodal; slimpipe trains on text alone"):
        IndexedDataset.open(prefix)


@pytest.mark.parametrize("missing", [".bin", ".idx"])
def test_one_of_the_pair_missing(missing: str, tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "x", [[1]])
    prefix.with_suffix(missing).unlink()
    with pytest.raises(
        DataError, match=rf"x{missing}: cannot be read \(No such file .*\); a token file is a pair, x.bin"
    ):
        IndexedDataset.open(prefix)


def test_sequences_out_of_range(tmp_path: Path) -> None:
    dataset = IndexedDataset.open(write_pair(tmp_path / "x", [[1]]))
    for number in (-1, 1):
        with pytest.raises(IndexError):
            dataset[number]
