"""A run saved in one layout goes on in others: the same weights and moments by every bit, and the same losses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slimpipe.train import checkpoint
from slimpipe.train.checkpoint import CheckpointError, Part, Peers
from slimpipe.train.session import Session
from tests.numerics.harness import S, case, config_of, roughen
from tests.support.cover import Case
from tests.support.pool import Pool

BEFORE, AFTER = 4, 3
LAYERS = 5
OPTIM = {"lr": 3e-3, "min_lr": 1e-3, "eps": 1e-6, "grad_clip": 1.0, "weight_decay": 0.1, "warmup_steps": 2}
SAVED: dict[str, Any] = {"pp": 2, "v": 1, "n": 4, "m": 2, "micro_batch": 2, "vocab_parallel": True}
OTHERS: dict[bool, dict[str, dict[str, Any]]] = {
    False: {
        "pp1": {"n": 4, "m": 4},
        "pp4": {"pp": 4, "n": 8, "m": 2, "micro_batch": 2, "vocab_parallel": True},
        "pp2-v2": {"pp": 2, "v": 2, "n": 4, "m": 2, "micro_batch": 2, "vocab_parallel": True},
    },
    True: {
        "pp1": {"n": 4, "m": 4},
        "pp4": {"pp": 4, "n": 8, "m": 2, "micro_batch": 2, "vocab_parallel": True},
        "pp2-v2-whole-vocabulary": {"pp": 2, "v": 2, "n": 4, "m": 2, "micro_batch": 2},
        "pp3-1f1b": {"schedule": "1f1b", "pp": 3, "m": 4},
    },
}
"""By whether the embedding is tied. Layouts with `vocab_parallel` hold rows of it, the last of them padding."""


def session_of(layout: Mapping[str, Any], tied: bool, **model: Any) -> Session:
    settings: Case = case(tied=tied, qk_norm=True, **layout)
    train = {"steps": BEFORE + AFTER, "global_batch": 4}
    return Session(config_of(settings, optim=OPTIM, model={"layers": LAYERS, **model}, train=train))


def batch(step: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(61, (4, S + 1), generator=torch.Generator().manual_seed(step))
    return text[:, :-1], text[:, 1:]


def train(session: Session, steps: int) -> list[float]:
    return [session.train_step(*batch(session.steps_done)).loss for _ in range(steps)]


def parts_of(session: Session) -> dict[str, tuple[Tensor, tuple[int, ...], tuple[int, ...]]]:
    return {name: (part.tensor.detach().clone(), part.offsets, part.size) for name, part in session.state().items()}


def begin(
    rank: int, world: int, layout: dict[str, Any], tied: bool, run: Path, after: int = AFTER
) -> tuple[list[float], Any]:
    """Trains, saves, trains on: the losses since, and the state that was saved."""
    session = session_of(layout, tied)
    roughen(session.weights())
    train(session, BEFORE)
    saved = parts_of(session)
    checkpoint.write(checkpoint.place(run, BEFORE), session.state(), {}, Peers.of_job("test", 60))
    return train(session, after), saved


def go_on(rank: int, world: int, layout: dict[str, Any], tied: bool, run: Path) -> tuple[list[float], Any]:
    """Loads and trains on: the losses since, and the state that was loaded."""
    session = session_of(layout, tied)
    state = session.state()
    checkpoint.read(checkpoint.place(run, BEFORE), state)
    session.restored(state)
    loaded = parts_of(session)
    return train(session, AFTER), loaded


def joined(ranks: Iterable[Mapping[str, tuple[Tensor, tuple[int, ...], tuple[int, ...]]]]) -> dict[str, Tensor]:
    """Every tensor whole. Where two ranks hold the same place, they hold the same bits."""
    whole: dict[str, Tensor] = {}
    for parts in ranks:
        for name, (tensor, offsets, size) in parts.items():
            # What no rank has is a number that nobody trained.
            target = whole.setdefault(name, torch.full(size, -77, dtype=tensor.dtype))
            for dim, (first, length) in enumerate(zip(offsets, tensor.shape, strict=True)):
                target = target.narrow(dim, first, length)
            assert (target == -77).all() or torch.equal(target, tensor), name
            target.copy_(tensor)
    assert all((tensor != -77).all() for tensor in whole.values())
    return whole


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_saved_at_two_ranks_it_goes_on_at_other_layouts(
    tied: bool, pool: Callable[[int], Pool], tmp_path: Path
) -> None:
    results = pool(2).run(begin, SAVED, tied, tmp_path)
    expected, saved = results[0][0], joined(parts for _, parts in results)
    moments = {f"optimizer.{name[6:]}.{m}" for name in saved if name[:6] == "model." for m in ("exp_avg", "exp_avg_sq")}
    assert moments < saved.keys() and all(saved[name].abs().sum() > 0 for name in moments)
    assert int(saved["step"]) == int(saved["optimizer.updates"]) == BEFORE

    results = pool(2).run(go_on, SAVED, tied, tmp_path)
    assert results[0][0] == expected  # at its own layout, to the bit
    for name, layout in OTHERS[tied].items():
        results = pool(layout.get("pp", 1)).run(go_on, layout, tied, tmp_path)
        loaded = joined(parts for _, parts in results)
        assert loaded.keys() == saved.keys(), name
        assert all(torch.equal(loaded[key], saved[key]) for key in saved), name
        losses = results[0][0]
        assert losses[0] == pytest.approx(expected[0], rel=1e-6), name
        assert losses[1:] == pytest.approx(expected[1:], rel=2e-5), name


def refused(rank: int, world: int, run: Path, model: dict[str, Any]) -> str:
    session = session_of(SAVED, False, **model)
    try:
        checkpoint.read(checkpoint.place(run, BEFORE), session.state())
    except CheckpointError as error:
        return str(error)
    return ""


def test_another_model_is_refused_by_the_first_tensor_that_does_not_fit(
    pool: Callable[[int], Pool], tmp_path: Path
) -> None:
    pool(2).run(begin, SAVED, False, tmp_path, 0)
    wider, more = ({"intermediate_size": 64}, {"layers": LAYERS + 1})
    said = pool(2).run(refused, tmp_path, wider)
    assert all("has shape (32, 48), the settings say (32, 64); use the settings it was" in line for line in said), said
    said = pool(2).run(refused, tmp_path, more)
    assert said[0] == "" and f"holds no tensor model.layers.{LAYERS}." in said[1]


def test_a_part_knows_its_place() -> None:
    part = Part.rows(torch.zeros(3, 5), 4, 11)
    assert (part.offsets, part.size) == ((4, 0), (11, 5))
    assert Part.whole(torch.zeros(())).offsets == ()
