"""Evaluation in mid-training: the plain process's loss, in the planned memory, and training as if it had not been."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from slimpipe.models.example import Block, ParallelBlocks
from slimpipe.runtime import vocabulary as vocabulary_module
from slimpipe.runtime.engine import Engine
from slimpipe.runtime.in_order_transport import InOrderWorld
from slimpipe.schedule import sliced_work
from slimpipe.train import planning
from slimpipe.train.evaluation import Evaluation
from slimpipe.train.planning import make_evaluation_plan, make_plan
from slimpipe.train.session import Session
from tests.numerics.harness import TOLERANCE, batch_of, case, config_of, copies, gathered, roughen, spec_of
from tests.schedule.test_forward_only import most_kept
from tests.support.cover import Case
from tests.support.pool import Pool
from tests.support.reference import IGNORED, reference_loss_and_grads

CASES = [
    case(n=4, m=2, mask="ragged"),
    case(pp=2, n=4, m=2, mask="ragged"),
    case(pp=2, v=2, n=4, m=2, mask="ragged", vocab_parallel=True),
    case(pp=2, v=2, n=2, m=1, micro_batch=2, kv="mha"),
    case(pp=2, n=8, m=3, vocab_parallel=True, tied=True),
    case(pp=2, n=1, m=3, tied=True, recompute="full"),
    case(pp=3, v=2, n=8, m=1, vocab_parallel=True, rope="llama3"),
    case(pp=3, n=2, m=3, recompute="all_but_attention"),
    case(schedule="gpipe", pp=3, m=2, mask="ragged"),
    case(schedule="1f1b", pp=3, m=4),
    case(schedule="interleaved", pp=2, v=2, m=4, mask="ragged"),
    case(pp=3, n=8, m=2, exchange="balanced", granule=2),
    case(pp=2, v=2, n=8, m=3, exchange="balanced", granule=2, vocab_parallel=True, keep="kv", mask="ragged"),
    case(pp=4, n=8, m=2, exchange="pairwise"),
]
# z-loss and smoothing are training's alone.
TRAIN = {"z_loss": 1e-2, "label_smoothing": 0.1}


@dataclass(frozen=True)
class Evaluated:
    """One rank's evaluation of two batches."""

    loss: float
    tokens: int
    weights: dict[str, Tensor]
    cut: tuple[str, ...]
    peak_units: int
    peak_kv_slots: tuple[int, ...]
    kept: int
    """Tensors saved for a backward."""


def batches(case: Case) -> list[tuple[Tensor, Tensor]]:
    """Two unlike batches, the second with few valid tokens, so that a mean of means would be wrong."""
    plain = replace(case, exchange="off", keep="none", granule=None)
    tokens, labels = batch_of(replace(plain, tied=not case.tied))
    labels[:, 10:] = IGNORED
    return [batch_of(plain), (tokens, labels)]


def evaluate(rank: int, world: int, case: Case, mistake: str | None = None) -> Evaluated:
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with MISTAKES[mistake]() if mistake else nullcontext():
        session = Session(config_of(case, train=TRAIN))
        roughen(session.weights())
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            found = session.evaluation.run(batches(case))
    weights = copies(session.weights())
    peaks = session.evaluation.peak_units, session.evaluation.peak_kv_slots
    return Evaluated(found.loss, found.tokens, weights, tuple(session.shards), *peaks, len(kept))


def errors(case: Case, ranks: list[Evaluated]) -> tuple[float, float]:
    """(relative error of the loss against one unsliced float64 process, spread between ranks)."""
    weights = gathered("weight", (rank.weights for rank in ranks), ranks[0].cut)
    tokens, labels = (torch.cat(parts) for parts in zip(*batches(case), strict=True))
    expected, _ = reference_loss_and_grads(spec_of(case), weights, tokens, labels, torch.float64)
    assert ranks[0].tokens == int((labels != IGNORED).sum())
    losses = [rank.loss for rank in ranks]
    return abs(losses[0] / float(expected) - 1), max(losses) - min(losses)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_loss_of_one_process_in_the_planned_memory(case: Case, pool: Callable[[int], Pool]) -> None:
    ranks = pool(case.pp).run(evaluate, case)
    error, spread = errors(case, ranks)
    assert error <= TOLERANCE
    assert spread == 0
    config = config_of(case)
    planned = make_evaluation_plan(config, make_plan(config), lambda what: None)
    assert planned.exchange is None or len(planned.exchange.loans) > 8
    assert [rank.peak_units for rank in ranks] == [most_kept(case.schedule, planned.plan.shape)] * case.pp
    assert [rank.peak_units for rank in ranks] == list(planned.peaks.units)
    assert [rank.peak_kv_slots for rank in ranks] == [(case.n,) * case.v] * case.pp
    assert [rank.kept for rank in ranks] == [0] * case.pp


def evaluate_in_threads(rank: int, world: int, case: Case) -> tuple[list[float], int]:
    """Each rank's part of the summed loss on the transport with NCCL's rule, and the sends that the plan asks for."""
    ranks = InOrderWorld(case.pp)
    config = config_of(case)
    heavy = sliced_work(case.n, 0.8, config.data.sequence_length // case.n)

    def one_rank(rank: int) -> tuple[float, int]:
        try:
            session = Session(
                config,
                transport=ranks.transport(rank),
                collectives=ranks.collectives(rank),
                exchange_traffic=ranks.exchange(rank),
                rank=rank,
            )
            roughen(session.weights())
            found = session.evaluation.run(batches(case))
            assert found is not None
            return found.loss, session.evaluation.planned.send_window
        finally:
            ranks.leave(rank)

    with mock.patch.object(planning, "_work", lambda config: heavy), ThreadPoolExecutor(case.pp) as threads:
        found = [part.result() for part in [threads.submit(one_rank, rank) for rank in range(case.pp)]]
    return [loss for loss, _ in found], found[0][1]


@pytest.mark.parametrize(
    ("case", "window"),
    [
        (case(pp=4, n=16, m=2, vocab_parallel=True), 3),
        (case(pp=2, v=2, n=4, m=2), 2),
        (case(pp=3, n=8, m=2, exchange="balanced", granule=2, vocab_parallel=True), 2),
    ],
    ids=str,
)
def test_the_same_in_nccls_order(case: Case, window: int, pool: Callable[[int], Pool]) -> None:
    ((losses, asked),) = pool(1).run(evaluate_in_threads, case)
    assert asked == window
    assert sum(losses) == pytest.approx(pool(case.pp).run(evaluate, case)[0].loss, rel=1e-6)


def _past_without_its_first_slice() -> Any:
    place = Engine.place

    def forgetful(engine: Engine, unit: Any) -> Any:
        found = place(engine, unit)
        return replace(found, past=tuple((start + (i == 0), stop) for i, (start, stop) in enumerate(found.past)))

    return mock.patch.object(Engine, "place", forgetful)


def _mean_of_means() -> Any:
    def run(evaluation: Evaluation, given: Any) -> Any:
        found = [original(evaluation, [batch]) for batch in given]
        tokens = sum(part.tokens for part in found)
        return replace(found[0], loss=sum(part.loss for part in found) / len(found), tokens=tokens)

    original = Evaluation.run
    return mock.patch.object(Evaluation, "run", run)


def _padding_in_the_softmax() -> Any:
    original = vocabulary_module.shard_statistics
    return mock.patch.object(
        vocabulary_module, "shard_statistics", lambda z, labels, first, count: original(z, labels, first, z.shape[-1])
    )


def _the_training_loss() -> Any:
    return mock.patch("slimpipe.train.evaluation.Loss", lambda: vocabulary_module.Loss(1e-2, 0.1))


MISTAKES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a slice's past lacks its first slice": _past_without_its_first_slice,
    "a mean of means": _mean_of_means,
    "padding enters the softmax": _padding_in_the_softmax,
    "z-loss and smoothing enter": _the_training_loss,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_comparison_sees_a_deliberate_mistake(mistake: str, pool: Callable[[int], Pool]) -> None:
    case = CASES[2]
    error, _ = errors(case, pool(case.pp).run(evaluate, case, mistake))
    assert error > 10 * TOLERANCE


# Two evaluations, and a step after the second.
EVERY = 2
STEPS = 5


@dataclass(frozen=True)
class Trained:
    """One rank's run of STEPS steps."""

    losses: list[float]
    norms: list[float]
    evaluations: list[float]
    state: dict[str, Tensor]
    random: Tensor
    disturbed: list[str]
    """What an evaluation changed, seen right behind it."""


def train(rank: int, world: int, case: Case, with_evaluation: bool, mistake: bool = False) -> Trained:
    torch.manual_seed(1)
    session = Session(config_of(case, optim={"lr": 1e-2}, train={"steps": STEPS, "z_loss": 1e-3}))
    losses, norms, evaluations, disturbed = [], [], [], []
    for step in range(1, STEPS + 1):
        metrics = session.train_step(*batch_of(replace(case, tied=step % 2 == 0)))
        losses.append(metrics.loss)
        norms.append(metrics.grad_norm)
        if with_evaluation and step % EVERY == 0:
            before = {**everything(session), "random numbers": torch.get_rng_state()}
            evaluations.append(session.evaluation.run(batches(case)).loss)
            if mistake:
                next(iter(session.weights().values())).view(-1)[0] += 1e-4
            after = {**everything(session), "random numbers": torch.get_rng_state()}
            disturbed += [name for name in before if not torch.equal(before[name], after[name])]
            spoil_kv_slots(session)
    return Trained(losses, norms, evaluations, everything(session), torch.get_rng_state(), disturbed)


def everything(session: Session) -> dict[str, Tensor]:
    """Weights, moments and gradients of a rank."""
    state = {f"gradient of {name}": gradient for name, gradient in session.gradients().items()}
    return copies(state | session.weights() | session.optimizer.state())


def spoil_kv_slots(session: Session) -> None:
    """Between steps they belong to nobody: whatever lies there must not matter."""
    for chunk in session.engine.layer_slots:
        for slots in chunk.values():
            for tensor in (slots.k, slots.v, slots.dk, slots.dv):
                if tensor is not None:
                    tensor.fill_(float("nan"))


@pytest.mark.parametrize("vocab", [False, True], ids=["whole", "vocab"])
@pytest.mark.parametrize("v", [1, 2])
def test_an_evaluation_every_other_step_changes_no_training_loss_by_a_bit(
    v: int, vocab: bool, pool: Callable[[int], Pool]
) -> None:
    layout = case(pp=2, v=v, n=4, m=2, mask="ragged", vocab_parallel=vocab)
    with_, without = (pool(2).run(train, layout, evaluate) for evaluate in (True, False))
    for ours, theirs in zip(with_, without, strict=True):
        assert ours.losses == theirs.losses
        assert ours.norms == theirs.norms
        assert ours.disturbed == []
        assert torch.equal(ours.random, theirs.random)
        assert all(torch.equal(ours.state[name], theirs.state[name]) for name in theirs.state)
        assert len(ours.evaluations) == STEPS // EVERY
    assert ours.losses[-1] < ours.losses[0]
    assert ours.evaluations[1] != ours.evaluations[0]


def test_a_disturbance_of_one_weight_would_be_seen(pool: Callable[[int], Pool]) -> None:
    layout = case(pp=2, n=4, m=2)
    with_, without = pool(2).run(train, layout, True, True), pool(2).run(train, layout, False)
    assert all(rank.disturbed for rank in with_)
    assert with_[0].losses != without[0].losses


class DroppingBlock(Block):
    """A block whose output drops out, and that draws a random number whatever the mode."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config, layer)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor, slice: Any) -> Tensor:
        torch.rand(1)
        return self.dropout(super().forward(x, slice))


class Dropping(ParallelBlocks):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(DroppingBlock(config, layer) for layer in range(config.model.layers))


def train_dropping(rank: int, world: int, with_evaluation: bool) -> tuple[list[float], list[float]]:
    torch.manual_seed(2)
    layout = case(n=2, m=1)
    model = {"name": f"{Dropping.__module__}:{Dropping.__name__}"}
    session = Session(config_of(layout, model=model, train={"steps": 4}))
    losses, evaluations = [], []
    for _ in range(4):
        losses.append(session.train_step(*batch_of(layout)).loss)
        if with_evaluation:
            evaluations.append(session.evaluation.run(batches(layout)).loss)
            with torch.random.fork_rng([]):
                torch.rand(1)  # other random numbers, which nothing must take
                evaluations.append(session.evaluation.run(batches(layout)).loss)
    return losses, evaluations


def test_a_models_dropout_is_off_in_evaluation_and_as_before_in_training(pool: Callable[[int], Pool]) -> None:
    ((with_, evaluations),) = pool(1).run(train_dropping, True)
    ((without, _),) = pool(1).run(train_dropping, False)
    assert with_ == without
    assert evaluations[::2] == evaluations[1::2]


def test_an_evaluation_of_nothing_is_refused_and_one_cut_short_says_nothing(pool: Callable[[int], Pool]) -> None:
    ((message, found, asked),) = pool(1).run(evaluate_nothing)
    assert message.startswith("the evaluation's labels are all masked")
    assert found is None
    assert asked == [False, True]


def evaluate_nothing(rank: int, world: int) -> tuple[str, Any, list[bool]]:
    layout = case(n=2)
    session = Session(config_of(layout))
    tokens, labels = batch_of(layout)
    answers, asked = iter([False, True, False]), []

    def cut_short() -> bool:
        asked.append(next(answers))
        return asked[-1]

    found = session.evaluation.run([(tokens, labels)] * 3, cut_short)
    with pytest.raises(ValueError) as caught:
        session.evaluation.run([(tokens, torch.full_like(labels, IGNORED))])
    return str(caught.value), found, asked
