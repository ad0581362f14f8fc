"""Transfers by way of host memory, and what the exchange's metrics count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slimpipe.parallel.mesh import pick_carrier
from slimpipe.runtime.carrier import Carrier, most_thread_blocks
from slimpipe.runtime.clock import covered
from slimpipe.schedule import Shape, build, links, lower
from slimpipe.train.planning import make_plan
from slimpipe.train.session import Session
from tests.numerics.harness import RankReport, S, batch_of, case, config_of, report, roughen, run_case
from tests.support.cover import Case
from tests.support.pool import Pool

LENDS = case(pp=3, n=8, m=2, exchange="balanced", granule=2, vocab_parallel=True, mask="ragged")


@pytest.mark.parametrize("layout", [LENDS, case(pp=3, v=2, n=4, m=2, tied=True)], ids=str)
def test_by_way_of_the_host_the_bits_are_the_same(layout: Case, pool: Callable[[int], Pool]) -> None:
    """On a CPU the copies alone are tested; with a GPU's tensors tests/gpu/test_host_carrier.py does it."""
    for staged, plain in zip(pool(3).run(through_host, layout), run_case(pool, layout), strict=True):
        assert staged.loss == plain.loss
        assert all(torch.equal(staged.gradients[name], plain.gradients[name]) for name in plain.gradients)


def through_host(rank: int, world: int, case: Case) -> RankReport:
    session = Session(config_of(case), Carrier(torch.device("cpu"), through_host=True))
    roughen(session.weights())
    return report(session, session.step_gradients(*batch_of(case)))


def test_bytes_are_those_of_the_plans_loans(pool: Callable[[int], Pool]) -> None:
    """Added up here by hand, loan by loan: keys and values of the range, query, output, LSE and their gradients."""
    found = pool(3).run(metrics_of, LENDS)
    exchange = make_plan(config_of(LENDS)).exchange
    assert exchange is not None
    config = config_of(LENDS)
    model, layers, element = config.model, config.model.layers // 3, 4
    query = element * config.train.micro_batch * (S // LENDS.n) * model.heads * model.head_dim
    lse = element * config.train.micro_batch * (S // LENDS.n) * model.heads
    sent, received = [0, 0, 0], [0, 0, 0]
    for loan in exchange.loans:
        keys = 2 * element * config.train.micro_batch * (loan.stop - loan.start) * model.kv_heads * model.head_dim
        forward = loan.slot.kind == "F"
        there = keys + (query if forward else 3 * query + lse)
        back = query + lse if forward else query + keys
        for source, target, size in ((loan.owner, loan.helper, there), (loan.helper, loan.owner, back)):
            sent[source] += layers * size
            received[target] += layers * size
    for measured in found:
        assert measured["sent_bytes"] == tuple(sent) and measured["received_bytes"] == tuple(received)
        assert measured["slot_max_s"] >= measured["slot_mean_s"] > 0
        assert measured["overlap"] is None  # no device tells


def metrics_of(rank: int, world: int, case: Case) -> dict[str, Any]:
    row = Session(config_of(case)).train_step(*batch_of(case))
    assert row.exchange is not None
    return asdict(row.exchange)


def test_overlapping_spans_count_once() -> None:
    assert covered([]) == 0
    assert covered([(0, 2), (1, 3), (5, 6), (5.25, 5.5)]) == 4


def test_a_carrier_that_is_not_there_is_refused() -> None:
    assert pick_carrier(config_of(case(), parallel={"carrier": "host"}), 0).memory.type == "cpu"
    with pytest.raises(ValueError, match=r"parallel\.carrier = nccl: .*runs on a CPU; use auto"):
        pick_carrier(config_of(case(), parallel={"carrier": "nccl"}), 0)


@pytest.mark.parametrize(
    ("p", "v", "passes", "loans", "communicators"),
    [
        (1, 1, False, False, 1),
        (2, 1, False, False, 2),
        (2, 2, False, False, 4),  # the wrap: a link each way more
        (8, 1, True, True, 7),
    ],
)
def test_transfers_of_all_communicators_fit_on_a_gpu_together(
    p: int, v: int, passes: bool, loans: bool, communicators: int
) -> None:
    """With a quarter of it left for compute, and for none fewer than that leaves."""
    blocks = most_thread_blocks(132, p, v, passes, loans)
    assert blocks * communicators <= 99 < (blocks + 1) * communicators
    assert most_thread_blocks(4, p, v, passes, loans) >= 1
    rank = {2: 0}.get(p, 1)
    plan = build("slimpipe", Shape(p, v, n=8, m=2))
    mine = {link for link in links(lower(plan)) if rank in (link.src, link.dst)} if p > 1 else set()
    assert max(1, len(mine) + loans + 2 * passes) == communicators


def test_a_named_number_of_thread_blocks_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    train = {"steps": 1, "output": "unused", "global_batch": 2, "device": "cuda"}
    shape = case(pp=2, n=4, m=2, exchange="balanced", vocab_parallel=True)
    assert pick_carrier(config_of(shape, train=train), 1).ctas == 99 // 5
    assert pick_carrier(config_of(shape, train=train, parallel={"pp": 2, "nccl_ctas": 3}), 1).ctas == 3
