"""The sampler: every window once an epoch, in an order that depends on nothing but seed and epoch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slimpipe.data import DataError, SequenceSampler, TokenFile
from slimpipe.data.tokens import TokenWriter

S = 8


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    """Token i is i: a window shows where it was taken. 20 windows of S + 1 tokens and 3 tokens left over."""
    path = tmp_path_factory.mktemp("tokens") / "tokens.bin"
    with TokenWriter(path, 1000, "a_corpus") as writer:
        writer.append(range(20 * S + 4))
    return TokenFile.open(path)


def starts(rows: torch.Tensor) -> list[int]:
    return [int(first) // S for first in rows[:, 0]]


def test_every_window_once_an_epoch(tokens: TokenFile) -> None:
    sampler = SequenceSampler(tokens, S, seed=3)
    assert sampler.windows == 20
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
    with TokenWriter(tmp_path / "tokens.bin", 1000, "a_corpus") as writer:
        writer.append(range(count))
    sampler = SequenceSampler(TokenFile.open(tmp_path / "tokens.bin"), S, seed=0)
    assert sampler.windows == windows
    assert sorted(starts(sampler.sequences(0, windows))) == list(range(windows))


def philox_4x64_10(counter: int, key: tuple[int, int]) -> list[int]:
    """Four numbers of the Philox generator, as published (Salmon et al., SC 2011)."""
    c, k, mask = [counter, 0, 0, 0], list(key), 2**64 - 1
    for _ in range(10):
        high_0, low_0 = divmod(0xD2E7470EE14C6C93 * c[0], 2**64)
        high_1, low_1 = divmod(0xCA5A826395121157 * c[2], 2**64)
        c = [high_1 ^ c[1] ^ k[0], low_1, high_0 ^ c[3] ^ k[1], low_0]
        k = [(k[0] + 0x9E3779B97F4A7C15) & mask, (k[1] + 0xBB67AE8584CAA73B) & mask]
    return c


@pytest.mark.parametrize("seed", [0, 7, -1])
@pytest.mark.parametrize("epoch", [0, 2])
def test_order_is_for_ever(tokens: TokenFile, seed: int, epoch: int) -> None:
    """A resumed run sees the same data under any numpy: the order is fixed by a published generator."""
    numbers = [n for block in range(1, 6) for n in philox_4x64_10(block, (seed % 2**64, epoch))]
    expected = sorted(range(20), key=lambda window: numbers[window])
    assert starts(SequenceSampler(tokens, S, seed).sequences(20 * epoch, 20)) == expected


def test_seeds_differ(tokens: TokenFile) -> None:
    orders = {tuple(starts(SequenceSampler(tokens, S, seed).sequences(0, 20))) for seed in range(50)}
    assert len(orders) == 50


@given(st.integers(0, 200), st.lists(st.integers(0, 30), max_size=5))
def test_does_not_depend_on_how_it_is_asked(tokens: TokenFile, start: int, counts: list[int]) -> None:
    """Any split over steps or ranks, in any order, gives the same sequences."""
    whole = SequenceSampler(tokens, S, seed=1).sequences(start, sum(counts))
    sampler = SequenceSampler(tokens, S, seed=1)
    places = [start + sum(counts[:i]) for i in range(len(counts))]
    parts = {i: sampler.sequences(places[i], counts[i]) for i in reversed(range(len(counts)))}
    assert torch.equal(torch.cat([parts[i] for i in range(len(counts))] or [whole]), whole)


@given(st.integers(0, 30), st.integers(1, 20))
def test_batch(tokens: TokenFile, step: int, global_batch: int) -> None:
    sampler = SequenceSampler(tokens, S, seed=1)
    inputs, labels = sampler.batch(step, global_batch)
    rows = sampler.sequences(step * global_batch, global_batch)
    assert inputs.shape == labels.shape == (global_batch, S)
    assert inputs.is_contiguous() and labels.is_contiguous()
    # Token i is i, so that the label of each is the next number, the last of the window's included.
    assert torch.equal(labels, inputs + 1)
    assert torch.equal(torch.cat([inputs, labels[:, -1:]], 1), rows)


def test_tensors_are_the_callers_own(tokens: TokenFile) -> None:
    sampler = SequenceSampler(tokens, S, seed=1)
    inputs, _ = sampler.batch(0, 4)
    before = inputs.clone()
    inputs.zero_()
    assert torch.equal(sampler.batch(0, 4)[0], before)


def test_too_few_tokens(tokens: TokenFile) -> None:
    sampler = SequenceSampler(tokens, S, seed=0)
    sampler.require(20)
    message = (
        r"^data.corpus = a_corpus: 164 tokens, needs at least 169 \(train.global_batch x data.sequence_length \+ 1\); "
        "use a larger corpus or lower train.global_batch or data.sequence_length$"
    )
    with pytest.raises(DataError, match=message):
        sampler.require(21)
    with pytest.raises(DataError, match=message):
        sampler.batch(0, 21)
    assert SequenceSampler(tokens, 163, seed=0).windows == 1
    with pytest.raises(DataError, match="164 tokens, needs at least 165"):
        SequenceSampler(tokens, 164, seed=0)
