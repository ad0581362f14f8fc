"""The sampler: every window once an epoch, in an order that depends on nothing but data, seed and step."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slimpipe.data import DataError, IndexedWriter, Part, SequenceSampler, TokenFile
from slimpipe.data.indexed import bin_path, idx_path
from slimpipe.data.shuffle import Permutation
from tests.data.conftest import whole, write_pair

S = 8


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> Part:
    """Token i is i: a window shows where it was taken. 20 windows of S + 1 tokens and 3 tokens left over."""
    return whole(write_pair(tmp_path_factory.mktemp("tokens") / "tokens", [range(100), range(100, 20 * S + 4)]))


@pytest.fixture(scope="module")
def parts(part: Part, tmp_path_factory: pytest.TempPathFactory) -> list[Part]:
    """Three sources of 20, 5 and 2 windows, tokens from 0, 1000 and 2000, weights 5, 3 and 2."""
    folder = tmp_path_factory.mktemp("blend")
    return [
        Part("data.blend[0].corpus", "a", part.tokens, 0, part.stop, 0.5),
        whole(write_pair(folder / "b", [range(1000, 1000 + 5 * S + 1)]), 0.3, "data.blend[1].corpus", "b"),
        whole(write_pair(folder / "c", [range(2000, 2000 + 2 * S + 1)]), 0.2, "data.blend[2].corpus", "c"),
    ]


def starts(rows: torch.Tensor) -> list[int]:
    return [int(first) // S for first in rows[:, 0]]


def test_every_window_once_an_epoch(part: Part) -> None:
    sampler = SequenceSampler([part], S, seed=3)
    assert sampler.windows == (20,)
    rows = sampler.sequences(0, 60)
    assert rows.dtype == torch.int64 and rows.shape == (60, S + 1)
    assert torch.equal(rows, rows[:, :1] + torch.arange(S + 1))
    assert (rows[:, 0] % S == 0).all()
    epochs = [starts(rows[i : i + 20]) for i in (0, 20, 40)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(20))
        assert epoch != list(range(20))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


@pytest.mark.parametrize(("count", "windows"), [(S + 1, 1), (2 * S, 1), (2 * S + 1, 2), (2 * S + 2, 2)])
def test_windows_overlap_in_one_token(tmp_path: Path, count: int, windows: int) -> None:
    sampler = SequenceSampler([whole(write_pair(tmp_path / "tokens", [range(count)]))], S, seed=0)
    assert sampler.windows == (windows,)
    assert sorted(starts(sampler.sequences(0, windows))) == list(range(windows))


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("epoch", [0, 2])
def test_order_is_that_of_seed_and_epoch(part: Part, seed: int, epoch: int) -> None:
    """A resumed run sees the same data: `test_shuffle` has the order written down."""
    order = Permutation(20, f"slimpipe {seed} {epoch} 0")
    assert starts(SequenceSampler([part], S, seed).sequences(20 * epoch, 20)) == [order(i) for i in range(20)]


def test_seeds_differ(part: Part) -> None:
    orders = {tuple(starts(SequenceSampler([part], S, seed).sequences(0, 20))) for seed in range(50)}
    assert len(orders) == 50


@given(st.booleans(), st.integers(0, 200), st.lists(st.integers(0, 30), max_size=5))
def test_does_not_depend_on_how_it_is_asked(parts: list[Part], one: bool, start: int, counts: list[int]) -> None:
    """Any split over steps or ranks, in any order, gives the same sequences."""
    taken = parts[:1] if one else parts
    everything = SequenceSampler(taken, S, seed=1).sequences(start, sum(counts))
    sampler = SequenceSampler(taken, S, seed=1)
    places = [start + sum(counts[:i]) for i in range(len(counts))]
    pieces = {i: sampler.sequences(places[i], counts[i]) for i in reversed(range(len(counts)))}
    assert torch.equal(torch.cat([pieces[i] for i in range(len(counts))] or [everything]), everything)


@given(st.integers(0, 60), st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_ranks_share_a_batch_whatever_their_number(parts: list[Part], step: int, dp_size: int) -> None:
    tokens, labels = SequenceSampler(parts, S, seed=1).batch(step, 12)
    ranks = [SequenceSampler(parts, S, seed=1).batch(step, 12, rank, dp_size) for rank in range(dp_size)]
    assert all(inputs.shape == (12 // dp_size, S) for inputs, _ in ranks)
    assert torch.equal(torch.cat([inputs for inputs, _ in ranks]), tokens)
    assert torch.equal(torch.cat([targets for _, targets in ranks]), labels)


@pytest.mark.parametrize(("rank", "size"), [(0, 5), (2, 2), (-1, 2)])
def test_ranks_that_cannot_be_dealt_to(part: Part, rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"12 sequences are not to be dealt to rank {rank} of {size}"):
        SequenceSampler([part], S, seed=0).batch(0, 12, rank, size)


@given(st.integers(0, 30), st.integers(1, 20))
def test_batch(part: Part, step: int, global_batch: int) -> None:
    sampler = SequenceSampler([part], S, seed=1)
    inputs, labels = sampler.batch(step, global_batch)
    rows = sampler.sequences(step * global_batch, global_batch)
    assert inputs.shape == labels.shape == (global_batch, S)
    assert inputs.is_contiguous() and labels.is_contiguous()
    # Token i is i, so that the label of each is the next number, the last of the window's included.
    assert torch.equal(labels, inputs + 1)
    assert torch.equal(torch.cat([inputs, labels[:, -1:]], 1), rows)


def test_tensors_are_the_callers_own(part: Part) -> None:
    sampler = SequenceSampler([part], S, seed=1)
    inputs, _ = sampler.batch(0, 4)
    before = inputs.clone()
    inputs.zero_()
    assert torch.equal(sampler.batch(0, 4)[0], before)


def test_a_blend_takes_turns_and_each_source_has_epochs_of_its_own(parts: list[Part]) -> None:
    rows = SequenceSampler(parts, S, seed=1).sequences(0, 100)
    source = [int(first) // 1000 for first in rows[:, 0]]
    for done in range(1, 101):
        for i, weight in enumerate((5, 3, 2)):
            assert abs(source[:done].count(i) - weight * done / 10) < 1
    # Whatever the turns, a source's own sequences come epoch by epoch.
    for i, (part, windows) in enumerate(zip(parts, (20, 5, 2), strict=True)):
        mine = [int(first) - 1000 * i for first in rows[:, 0] if int(first) // 1000 == i]
        assert mine == [part.start + first for first in mine]
        for start in range(0, len(mine) - windows, windows):
            assert sorted(mine[start : start + windows]) == [S * window for window in range(windows)]


def test_places(parts: list[Part]) -> None:
    sampler = SequenceSampler(parts, S, seed=1)
    rows, places = sampler.sequences(7, 30), sampler.places(7, 30)
    for row, place in zip(rows, places, strict=True):
        assert place.source == "abc"[place.part]
        assert row.tolist() == list(range(1000 * place.part + place.start, 1000 * place.part + place.stop))
    assert {place.epoch for place in places if place.source == "a"} == {0}
    assert str(places[0]) == f"{places[0].source}, tokens {places[0].start} to {places[0].stop - 1}, epoch 0"


def test_a_part_is_all_that_is_read(part: Part) -> None:
    middle = Part("data.corpus", "a", part.tokens, 50, 50 + 3 * S + 1)
    rows = SequenceSampler([middle], S, seed=0).sequences(0, 6)
    assert sorted(set(rows.flatten().tolist())) == list(range(50, 50 + 3 * S + 1))


def test_too_few_tokens(part: Part, parts: list[Part]) -> None:
    sampler = SequenceSampler([part], S, seed=0)
    sampler.require(20)
    message = (
        r"^data.corpus = a_corpus: 164 tokens, needs at least 169 \(train.global_batch x data.sequence_length \+ 1\); "
        "use a larger corpus or lower train.global_batch or data.sequence_length$"
    )
    with pytest.raises(DataError, match=message):
        sampler.require(21)
    with pytest.raises(DataError, match=message):
        sampler.batch(0, 21)
    assert SequenceSampler([part], 163, seed=0).windows == (1,)
    with pytest.raises(DataError, match="164 tokens, needs at least 165"):
        SequenceSampler([part], 164, seed=0)
    with pytest.raises(DataError, match=r"^data.blend\[2\].corpus = c: 17 tokens, needs at least 18 "):
        SequenceSampler(parts, 17, seed=0)


def test_tokens_outside_of_the_vocabulary(part: Part, tmp_path: Path) -> None:
    SequenceSampler([part], S, 0, vocab_size=164).sequences(0, 20)
    with pytest.raises(
        DataError, match=r"^model.vocab_size = 158: token 158 at place 158 of a_corpus is outside of it;"
    ):
        SequenceSampler([part], S, 0, vocab_size=158).sequences(0, 20)
    negative = whole(write_pair(tmp_path / "negative", [[1, 2, -3, *range(20)]], "int32"))
    with pytest.raises(DataError, match="token -3 at place 2 "):
        SequenceSampler([negative], S, 0, vocab_size=100).sequences(0, 2)


LARGE = 6 << 30  # tokens: 12 GiB, none of them on disk


@pytest.fixture
def large(tmp_path: Path) -> TokenFile:
    """A token file of zeros, in six documents, that takes no room: a hole."""
    prefix = write_pair(tmp_path / "large", [])
    lengths = np.full(6, 1 << 30, "<i4")
    with idx_path(prefix).open("r+b") as file:
        head = bytearray(file.read(34))
        head[18:26], head[26:34] = (6).to_bytes(8, "little"), (7).to_bytes(8, "little")
        pointers = (np.arange(6, dtype="<i8") << 31).tobytes()
        file.seek(0)
        file.write(bytes(head) + lengths.tobytes() + pointers + np.arange(7, dtype="<i8").tobytes())
    os.truncate(bin_path(prefix), 2 * LARGE)
    return TokenFile.open(prefix)


def test_long_sequences_read_their_own_bytes_alone(large: TokenFile) -> None:
    """Sequences of 2 M tokens, 4 MiB, out of a file of 12 GiB, over the bounds of documents too."""
    length = 1 << 21
    sampler = SequenceSampler([Part("data.corpus", "a", large, 0, large.count)], length, seed=0)
    assert sampler.windows == (LARGE // length - 1,)
    sampler.sequences(0, 1)
    before = _resident()
    rows = sampler.sequences(1, 4)
    mapped, own = (now - then for now, then in zip(_resident(), before, strict=True))
    assert rows.shape == (4, length + 1) and not rows.any()
    # Pages of the file that were touched, and no others: what the kernel maps around a fault is 64 KiB. Of its own, the
    # rows alone.
    assert mapped < 1.1 * 4 * 2 * length
    assert own < 1.2 * 4 * 8 * length


def test_reading_on_and_on_takes_no_more_memory(large: TokenFile) -> None:
    """50 steps of 2 MiB. The ones before count for nothing: the allocator settles."""
    sampler = SequenceSampler([Part("data.corpus", "a", large, 0, large.count)], 1 << 16, seed=0)
    used = []
    for step in range(70):
        sampler.batch(step, 4)
        used.append(_resident()[1])
    assert used[69] - used[19] < 16 << 20


def _resident() -> tuple[int, int]:
    """(bytes of mapped files, bytes of its own) that this process has in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith("Rss")}
    assert resource.getpagesize() <= 65536
    return found["RssFile"] << 10, found["RssAnon"] << 10


def test_an_interrupted_write_is_no_token_file(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), IndexedWriter(tmp_path / "x", "uint16") as writer:
        writer.append([1, 2])
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
