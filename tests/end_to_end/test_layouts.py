"""configs/quickstart.yaml gives the same losses however it is cut into ranks, virtual stages and slices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from slimpipe.config import Config, load_config
from slimpipe.train.session import Session
from tests.end_to_end.launch import QUICKSTART
from tests.numerics.harness import copies, gathered
from tests.support.pool import Pool

STEPS = 2
# (pp, v, n); pp = 1, v = 1, n = 1 is the plain run. Crossed: pp with no slices, slices, and slices and chunks.
# Every n with every v is for tests/numerics/test_gradients.py, on smaller models.
LAYOUTS = [(pp, v, n) for pp in (1, 2, 4) for v, n in ((1, 1), (1, 8), (2, 4))]


@dataclass(frozen=True)
class Training:
    """One rank's first weights, the names of those of which it has its rows only, and the losses of its steps."""

    first: dict[str, Tensor]
    cut: tuple[str, ...]
    losses: list[float]


def quickstart(pp: int, v: int, n: int) -> Config:
    """The file as it is, but for the layout and a batch that takes tenths of a second a step."""
    layout = [f"parallel.pp={pp}", f"pipeline.virtual_stages={v}", f"pipeline.slices={n}"]
    return load_config(QUICKSTART, [*layout, "data.sequence_length=64", "train.global_batch=3", "train.micro_batch=1"])


def train(rank: int, world: int, layouts: list[tuple[int, int, int]]) -> list[Training]:
    return [train_one(quickstart(*layout)) for layout in layouts]


def train_one(config: Config) -> Training:
    session = Session(config)
    first = copies(session.weights())
    shape = (config.train.global_batch, config.data.sequence_length + 1)
    text = torch.randint(config.model.vocab_size, shape, generator=torch.Generator().manual_seed(1))
    return Training(
        first, tuple(session.shards), [session.train_step(text[:, :-1], text[:, 1:]).loss for _ in range(STEPS)]
    )


@pytest.fixture(scope="module")
def trainings(pool: Callable[[int], Pool]) -> dict[tuple[int, int, int], list[Training]]:
    """Every layout's, by rank."""
    found = {}
    for pp in (1, 2, 4):
        layouts = [layout for layout in LAYOUTS if layout[0] == pp]
        ranks = pool(pp).run(train, layouts, timeout=240)
        found |= {layout: list(of_layout) for layout, of_layout in zip(layouts, zip(*ranks, strict=True), strict=True)}
    return found


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=lambda layout: "p{}-v{}-n{}".format(*layout))
def test_same_losses_and_first_weights(
    layout: tuple[int, int, int], trainings: dict[tuple[int, int, int], list[Training]]
) -> None:
    (plain,), ranks = trainings[1, 1, 1], trainings[layout]
    assert plain.losses[1] < plain.losses[0] * (1 - 1e-3)  # the step was large enough to be told apart
    for rank in ranks:
        assert rank.losses == pytest.approx(plain.losses, rel=1e-5)
    first = gathered("weight", (rank.first for rank in ranks), ranks[0].cut)
    assert first.keys() == plain.first.keys()
    assert all(torch.equal(first[name], plain.first[name]) for name in first)
