"""Steps of the optimizer: the same on every layout, bitwise the same twice, and those of a plain process."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slimpipe.parallel.optimizer import learning_rate
from slimpipe.train.session import Session
from tests.numerics.harness import INIT_STD, batch_of, case, config_of, copies, gathered, roughen, spec_of
from tests.support.cover import Case
from tests.support.pool import Pool
from tests.support.reference import reference_loss_and_grads, relative_error

STEPS = 3
# Four sequences a step, cut into microbatches, slices and stages in every way.
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {"micro_batch": 4},
    "p1-n8": {"n": 8, "m": 2, "micro_batch": 2},
    "p1-v2-n4": {"v": 2, "n": 4, "m": 1, "micro_batch": 4},
    "p2-n4": {"pp": 2, "n": 4, "m": 4},
    "p2-v2-n2": {"pp": 2, "v": 2, "n": 2, "m": 2, "micro_batch": 2},
    "p3-n1": {"pp": 3, "n": 1, "m": 4},
    "p4-1f1b": {"schedule": "1f1b", "pp": 4, "m": 4},
    "p4-interleaved": {"schedule": "interleaved", "pp": 4, "v": 2, "m": 4},
}


LAYERS = 9
# Adam's epsilon is large enough that rounding in a gradient near zero does not become a step.
OPTIM = {"lr": 1e-2, "min_lr": 1e-3, "eps": 1e-4, "grad_clip": 1.0, "weight_decay": 0.1, "warmup_steps": 1}


def layout(name: str, tied: bool = False) -> Case:
    return case(tied=tied, qk_norm=True, **LAYOUTS[name])


def shared_batch() -> tuple[Tensor, Tensor]:
    """The same four ragged sequences for every layout."""
    return batch_of(case(n=4, m=4, mask="ragged"))


@dataclass(frozen=True)
class Training:
    """One rank's three steps."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    first: dict[str, Tensor]
    last: dict[str, Tensor]


def train(rank: int, world: int, case: Case) -> Training:
    session = Session(config_of(case, optim=OPTIM, model={"layers": LAYERS}))
    roughen(session.weights())
    first = copies(session.weights())
    steps = [session.train_step(*shared_batch()) for _ in range(STEPS)]
    losses, norms, rates = ([getattr(step, what) for step in steps] for what in ("loss", "grad_norm", "lr"))
    return Training(losses, norms, rates, first, copies(session.weights()))


def initial_weights(rank: int, world: int, case: Case, seed: int) -> dict[str, Tensor]:
    return copies(Session(config_of(case, train={"seed": seed}, model={"layers": LAYERS})).weights())


@pytest.fixture(scope="module")
def plain(pool: Callable[[int], Pool]) -> dict[bool, Training]:
    """The engine's own plain run, p = v = n = m = 1, untied and tied."""
    return {tied: pool(1).run(train, layout("plain", tied))[0] for tied in (False, True)}


# Tied where the two ends are one process's, where chunks lie between them, and where other ranks do, with 1F1B.
@pytest.mark.parametrize(
    ("name", "tied"),
    [*((name, False) for name in LAYOUTS if name != "plain"), ("p1-n8", True), ("p2-v2-n2", True), ("p4-1f1b", True)],
)
def test_every_layout_trains_alike_and_each_run_twice_alike_to_the_bit(
    name: str, tied: bool, pool: Callable[[int], Pool], plain: dict[bool, Training]
) -> None:
    case = layout(name, tied)
    ranks, again = (pool(case.pp).run(train, case) for _ in range(2))
    for rank, same in zip(ranks, again, strict=True):
        assert (rank.losses, rank.norms) == (ranks[0].losses, ranks[0].norms) == (same.losses, same.norms)
    one, expected = ranks[0], plain[tied]
    assert one.rates == expected.rates
    assert one.losses[0] == pytest.approx(expected.losses[0], rel=1e-6)
    assert one.norms[0] == pytest.approx(expected.norms[0], rel=1e-6)
    # From the second step on the weights differ by rounding.
    assert one.losses == pytest.approx(expected.losses, rel=1e-5)
    assert one.norms == pytest.approx(expected.norms, rel=1e-5)
    first, last, last_again = (
        gathered("weight", (r.first for r in ranks)),
        gathered("weight", (r.last for r in ranks)),
        gathered("weight", (r.last for r in again)),
    )
    assert first.keys() == last.keys() == expected.last.keys()
    for weight in last:
        assert torch.equal(first[weight], expected.first[weight])
        assert torch.equal(last[weight], last_again[weight])
        assert relative_error(last[weight], expected.last[weight]) < 1e-5, weight


def test_the_rate_rises_then_follows_a_cosine_that_ends_with_the_last_step() -> None:
    config = config_of(case(), optim=OPTIM | {"warmup_steps": 4}, train={"steps": 13})
    rates = [learning_rate(config, step) for step in range(14)]
    assert rates[:5] == pytest.approx([2.5e-3, 5e-3, 7.5e-3, 1e-2, 1e-2])
    assert rates[6] == pytest.approx(1e-3 + 9e-3 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert rates[8] == pytest.approx(5.5e-3)
    assert rates[12] == rates[13] == pytest.approx(1e-3)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_plain_run_takes_the_steps_of_torchs_adamw_on_the_reference(
    tied: bool, plain: dict[bool, Training]
) -> None:
    """In float64, clipped and decayed by the textbook: warm-up over one step, then a cosine to `min_lr`."""
    spec = replace(spec_of(layout("plain", tied)), layers=LAYERS)
    weights = {name: weight.double() for name, weight in plain[tied].first.items()}
    decayed = [weight for weight in weights.values() if weight.dim() > 1]
    vectors = [weight for weight in weights.values() if weight.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=OPTIM["eps"], foreach=False)
    rates = [1e-2, 1e-2, 1e-3]
    losses, norms = [], []
    for rate in rates:
        loss, grads = reference_loss_and_grads(spec, weights, *shared_batch(), torch.float64)
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads.values()))
        losses.append(float(loss))
        norms.append(norm)
        for name, weight in weights.items():
            weight.grad = grads[name] * min(1.0, OPTIM["grad_clip"] / norm)
        for group in adamw.param_groups:
            group["lr"] = rate
        adamw.step()
    assert norms[0] > OPTIM["grad_clip"]
    assert plain[tied].rates == pytest.approx(rates)
    assert plain[tied].losses == pytest.approx(losses, rel=1e-5)
    assert plain[tied].norms == pytest.approx(norms, rel=1e-5)
    assert losses[-1] < losses[0] - 0.1  # the steps were large enough to be told apart
    for name, weight in weights.items():
        assert relative_error(plain[tied].last[name], weight) < 1e-5, name


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_first_weights_do_not_depend_on_the_layout(tied: bool, pool: Callable[[int], Pool]) -> None:
    expected = pool(1).run(initial_weights, layout("plain", tied), 5)[0]
    for name in LAYOUTS:
        found = gathered("weight", pool(layout(name).pp).run(initial_weights, layout(name, tied), 5))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[weight], expected[weight]) for weight in expected), name


def test_first_weights_depend_on_the_seed_and_on_the_name(pool: Callable[[int], Pool]) -> None:
    one, other = (pool(1).run(initial_weights, layout("plain"), seed)[0] for seed in (5, 6))
    matrices = [name for name in one if one[name].dim() > 1]
    assert not any(torch.equal(one[name], other[name]) for name in matrices)
    assert all(torch.equal(one[name], torch.ones_like(one[name])) for name in one.keys() - matrices)
    assert len({float(one[name].sum()) for name in matrices}) == len(matrices)
    deviations = torch.stack([one[name].std() for name in matrices])
    assert ((deviations / INIT_STD - 1).abs() < 0.1).all()
