"""The run's place in its data: exact, small, valid at another number of ranks, and of these data alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slimpipe.data import DataError, Loader, Part, SequenceSampler
from tests.data.conftest import whole, write_pair

S = 8


def blend(folder: Path, tokens: int = 100, weights: tuple[float, ...] = (0.7, 0.2, 0.1)) -> list[Part]:
    return [
        whole(
            write_pair(folder / f"{i}-{tokens}", [range(1000 * i, 1000 * i + tokens)]),
            weight,
            f"data.blend[{i}].corpus",
            "abc"[i],
        )
        for i, weight in enumerate(weights)
    ]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Part]:
    return blend(tmp_path_factory.mktemp("blend"))


def make(parts: list[Part], global_batch: int = 12, rank: int = 0, size: int = 1, seed: int = 5) -> Loader:
    return Loader(SequenceSampler(parts, S, seed), global_batch, rank, size)


def ranks(parts: list[Part], size: int, global_batch: int = 12) -> list[Loader]:
    return [make(parts, global_batch, rank, size) for rank in range(size)]


def global_step(loaders: list[Loader]) -> torch.Tensor:
    return torch.cat([loader.next()[0] for loader in loaders])


@given(st.booleans(), st.integers(0, 9), st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([1, 2, 3, 4, 6]))
def test_resumes_at_any_number_of_ranks(parts: list[Part], one: bool, steps: int, before: int, after: int) -> None:
    """Every rank's state is the same, and goes on exactly where the uninterrupted run does."""
    taken = parts[:1] if one else parts
    whole_run = make(taken)
    expected = [whole_run.next()[0] for _ in range(steps + 4)]
    first = ranks(taken, before)
    seen = [global_step(first) for _ in range(steps)]
    states = [json.dumps(loader.state_dict()) for loader in first]
    assert len(set(states)) == 1 and len(states[0]) < 1000
    second = ranks(taken, after)
    for loader in second:
        loader.load_state_dict(json.loads(states[0]))
    seen += [global_step(second) for _ in range(4)]
    assert all(map(torch.equal, seen, expected))


def test_resumes_with_another_batch(parts: list[Part]) -> None:
    rows = SequenceSampler(parts, S, 5).sequences(0, 60)[:, :-1]
    first = make(parts, 12)
    for _ in range(3):
        first.next()
    second = make(parts, 4)
    second.load_state_dict(first.state_dict())
    assert torch.equal(second.next()[0], rows[36:40])


def test_resuming_takes_no_longer_the_later_it_is(parts: list[Part], monkeypatch: pytest.MonkeyPatch) -> None:
    """A million steps in, the blend is not run through from its beginning."""
    late = make(parts)
    late.consumed = 12_000_000
    counts = [8_400_000, 2_400_000, 1_200_000]
    state = {**make(parts).state_dict(), "consumed": sum(counts), "counts": counts}
    turns = 0
    from slimpipe.data.blend import Blend

    original = Blend.turn

    def counted(self: Blend) -> int:
        nonlocal turns
        turns += 1
        return original(self)

    monkeypatch.setattr(Blend, "turn", counted)
    loader = make(parts)
    loader.load_state_dict(state)
    loader.next()
    assert turns == 12


def test_places_of_the_last_batch(parts: list[Part]) -> None:
    loader = make(parts, 12, 1, 2)
    assert loader.places == []
    tokens, _ = loader.next()
    assert len(loader.places) == 6
    for row, place in zip(tokens, loader.places, strict=True):
        assert int(row[0]) == 1000 * place.part + place.start


def test_other_data_are_refused(parts: list[Part], tmp_path: Path) -> None:
    state = make(parts).state_dict()
    remedy = r"; set it back, or start anew from the checkpoint's weights alone \(train.init_from\)$"
    other = tmp_path / "other"
    other.mkdir()
    changed = [parts[0], whole(write_pair(other / "b", [range(1000, 1099), [7]]), 0.2, parts[1].key, "b"), parts[2]]
    refusals: list[tuple[Loader, str]] = [
        (make(changed), r"^data.blend\[1\].corpus = b: its tokens are not those that the checkpoint was trained on"),
        (make(parts[:2]), "^data.blend: 2 sources, but the checkpoint's place is in 3"),
        (make([parts[0], parts[2], parts[1]]), r"^data.blend\[2\].corpus = c: its tokens are not"),
        (make(blend(tmp_path, weights=(0.6, 0.3, 0.1))), "^data.blend: the weights are not those of the checkpoint"),
        (make(parts, seed=6), "^train.seed = 6: the checkpoint's place in the data was reached with 5"),
        (
            Loader(SequenceSampler(parts, 9, 5), 4),
            "^data.sequence_length = 9: the checkpoint's place in the data was reached with 8",
        ),
        (make([*parts[:2], Part("k", "c", parts[2].tokens, 0, 90, 0.1)]), "^k = c: its tokens are not those"),
    ]
    for loader, message in refusals:
        with pytest.raises(DataError, match=message + ".*" + remedy):
            loader.load_state_dict(state)
        assert loader.consumed == 0
    # The same data elsewhere, under other names, and weights in the same proportion.
    same = make(blend(tmp_path, weights=(7, 2, 1)))
    same.load_state_dict(state)


@pytest.mark.parametrize(
    "change",
    [
        {"consumed": "x"},
        {"counts": None},
        {"counts": [1, 0, 0]},
        {"consumed": 12, "counts": [0, 0, 12]},
        {"consumed": -1, "counts": [-1, 0, 0]},
        {"sources": 3},
    ],
)
def test_a_malformed_state(parts: list[Part], change: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="malformed|are not of a blend"):
        make(parts).load_state_dict({**make(parts).state_dict(), **change})
