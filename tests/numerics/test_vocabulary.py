"""Vocabulary parallelism against the plain process: every slimpipe layout once more, and the corners of the shards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from slimpipe.runtime import vocabulary as vocabulary_module
from slimpipe.train.planning import make_plan
from slimpipe.train.session import Session
from tests.numerics.harness import (
    RankReport,
    batch_of,
    case,
    config_of,
    copies,
    discrepancies,
    gathered,
    report,
    roughen,
    spec_of,
)
from tests.numerics.in_order import in_threads
from tests.support.cover import Case, all_supported
from tests.support.pool import Pool
from tests.support.reference import IGNORED, reference_loss_and_grads, relative_error

# Crossed: p, v, n and m. The vocabulary's passes of m = 2 are the first and the last ones of m = 4.
CASES = [
    replace(case, vocab_parallel=True)
    for case in all_supported()
    if case.pp > 1 and case.schedule == "slimpipe" and case.m != 2
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_every_gradient_equal_the_plain_process(
    case: Case, reports: Callable[[Case], list[RankReport]]
) -> None:
    """V = 61 divides by no number of ranks here: the last shard is padded."""
    ranks = reports(case)
    assert ranks[0].cut == (("embedding.weight",) if case.tied else ("embedding.weight", "head.weight"))
    assert discrepancies(case, ranks) == []
    peaks = make_plan(config_of(case)).peaks
    assert [rank.peak_units for rank in ranks] == list(peaks.units)
    assert [rank.peak_kv_slots for rank in ranks] == list(peaks.kv_slots)


@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_the_in_order_transport_gives_the_same(
    case: Case, pool: Callable[[int], Pool], reports: Callable[[Case], list[RankReport]]
) -> None:
    """To the bit on two ranks; with more, gloo's reduce adds the ranks' parts in an order of its own."""
    (threads,) = pool(1).run(in_threads, case)
    for ours, theirs in zip(threads, reports(case), strict=True):
        assert ours.gradients.keys() == theirs.gradients.keys()
        bound = 0.0 if case.pp == 2 else 1e-5
        assert all(relative_error(ours.gradients[n], theirs.gradients[n]) <= bound for n in theirs.gradients)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocab", [5, 7, 3])
def test_shards_that_are_mostly_padding(vocab: int, tied: bool, pool: Callable[[int], Pool]) -> None:
    """Four ranks: 5 words leave the last one none and the third one, 3 words leave it none with shards of one row."""
    layout = case(pp=4, n=4, m=2, tied=tied, mask="ragged", vocab_parallel=True)
    reports = pool(4).run(small_vocabulary, layout, vocab)
    weights = gathered("weight", (part["weights"] for part in reports), reports[0]["cut"])
    gradients = gathered("gradient", (part["gradients"] for part in reports), reports[0]["cut"])
    assert gradients["embedding.weight"].shape[0] == vocab
    tokens, labels = reports[0]["batch"]
    loss, expected = reference_loss_and_grads(
        replace(spec_of(layout), vocab=vocab), weights, tokens, labels, torch.float64
    )
    assert reports[0]["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert [name for name in expected if not _close(gradients, expected, name)] == []
    assert all(part["padding"] == 0.0 for part in reports)


def _close(found: dict[str, Tensor], expected: dict[str, Tensor], name: str) -> bool:
    return relative_error(found[name], expected[name]) <= 1e-5


def small_vocabulary(rank: int, world: int, case: Case, vocab: int) -> dict[str, Any]:
    session = Session(config_of(case, model={"vocab_size": vocab}))
    roughen(session.weights())
    tokens, labels = batch_of(case)
    tokens, labels = tokens % vocab, torch.where(labels == IGNORED, labels, labels % vocab)
    loss = session.step_gradients(tokens, labels)
    padding = sum(
        float(shard.weight.main_grad[shard.rows.count :].abs().sum())  # type: ignore[attr-defined]
        for shard in session.shards.values()
    )
    return {
        "loss": loss,
        "weights": copies(session.weights()),
        "gradients": copies(session.gradients()),
        "cut": tuple(session.shards),
        "batch": (tokens, labels),
        "padding": padding,
    }


LOSSES = [{"z_loss": 0.01}, {"label_smoothing": 0.1}, {"z_loss": 1e-3, "label_smoothing": 0.05}]


@pytest.mark.parametrize("options", LOSSES, ids=str)
@pytest.mark.parametrize("parallel", [False, True])
def test_z_loss_and_label_smoothing(parallel: bool, options: dict[str, float], pool: Callable[[int], Pool]) -> None:
    """Against the definition, written out over whole logits: -(1 - e) log p_y - e mean log p + z lse^2."""
    layout = case(pp=2, n=4, m=2, mask="ragged", vocab_parallel=parallel)
    reports = pool(2).run(with_options, layout, options)
    weights = gathered("weight", (part.weights for part in reports), reports[0].cut)
    gradients = gathered("gradient", (part.gradients for part in reports), reports[0].cut)
    tokens, labels = batch_of(layout)
    loss, expected = reference_loss_and_grads(spec_of(layout), weights, tokens, labels, torch.float64, **options)
    assert reports[0].loss == pytest.approx(float(loss), rel=1e-5)
    assert [name for name in expected if not _close(gradients, expected, name)] == []


def with_options(rank: int, world: int, case: Case, options: dict[str, float]) -> RankReport:
    session = Session(config_of(case, train=options))
    roughen(session.weights())
    return report(session, session.step_gradients(*batch_of(case)))


def test_huge_logits_stay_finite_and_right(pool: Callable[[int], Pool]) -> None:
    """Output weights scaled up until logits reach 1e4: exponentials without their maximum taken out overflow."""
    layout = case(pp=3, n=4, m=2, vocab_parallel=True)
    reports = pool(3).run(with_huge_logits, layout)
    weights = gathered("weight", (part.weights for part in reports), reports[0].cut)
    gradients = gathered("gradient", (part.gradients for part in reports), reports[0].cut)
    loss, expected = reference_loss_and_grads(spec_of(layout), weights, *batch_of(layout), torch.float64)
    assert float(loss) > 1e3
    assert reports[0].loss == pytest.approx(float(loss), rel=1e-5)
    # fp32 resolves a logit of 1e4 to 1e-3 only: the softmax between near ties can be no better than that.
    assert all(torch.isfinite(gradients[name]).all() for name in gradients)
    assert max(relative_error(gradients[name], expected[name]) for name in expected) <= 1e-2


def with_huge_logits(rank: int, world: int, case: Case) -> RankReport:
    session = Session(config_of(case))
    session.weights()["head.weight"].mul_(3e4)
    return report(session, session.step_gradients(*batch_of(case)))


@pytest.mark.parametrize("layout", [case(n=4, m=2), case(pp=2, n=4, m=2), case(pp=3, v=2, n=4, m=2)], ids=str)
@pytest.mark.parametrize("parallel", [False, True])
def test_token_losses_add_up_and_leave_training_as_it_was(
    layout: Case, parallel: bool, pool: Callable[[int], Pool]
) -> None:
    layout = replace(layout, vocab_parallel=parallel, mask="ragged")
    for before, losses, after in pool(layout.pp).run(evaluate_between, layout):
        _, labels = batch_of(layout)
        assert losses.shape == labels.shape
        assert float(losses.sum() / (labels != IGNORED).sum()) == pytest.approx(before.loss, rel=1e-5)
        assert (losses[labels == IGNORED] == 0).all()
        assert (losses[labels != IGNORED] > 0).all()
        assert before.loss == after.loss
        assert all(torch.equal(before.gradients[name], after.gradients[name]) for name in before.gradients)


def evaluate_between(rank: int, world: int, case: Case) -> tuple[RankReport, Tensor, RankReport]:
    session = Session(config_of(case))
    before = report(session, session.step_gradients(*batch_of(case)))
    losses = session.token_losses(*batch_of(case))
    return before, losses, report(session, session.step_gradients(*batch_of(case)))


def _wrong_rows() -> Any:
    """Padding enters the softmax."""
    original = vocabulary_module.shard_statistics
    return mock.patch.object(
        vocabulary_module, "shard_statistics", lambda z, labels, first, count: original(z, labels, first, z.shape[-1])
    )


def _local_softmax() -> Any:
    """Every shard normalises by itself."""
    return mock.patch.object(vocabulary_module, "join_statistics", lambda parts: parts[0])


def _no_embedding_gradient() -> Any:
    return mock.patch.object(vocabulary_module, "add_shard_gradient", lambda *args: None)


MISTAKES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "padding enters the softmax": _wrong_rows,
    "every shard normalises by itself": _local_softmax,
    "the embedding's gradient is lost": _no_embedding_gradient,
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_comparison_sees_a_deliberate_mistake(name: str, pool: Callable[[int], Pool]) -> None:
    layout = case(pp=2, n=4, m=2, mask="ragged", vocab_parallel=True)
    assert discrepancies(layout, pool(2).run(mistaken, layout, name)) != []


def mistaken(rank: int, world: int, case: Case, name: str) -> RankReport:
    with MISTAKES[name]():
        session = Session(config_of(case))
        roughen(session.weights())
        return report(session, session.step_gradients(*batch_of(case)))
