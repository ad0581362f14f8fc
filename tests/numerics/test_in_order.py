"""Every plan once more on a transport with NCCL's in-order rule: a green gloo run says nothing about NCCL's order.

The ranks are threads of one process; what they compute must be the distributed run's, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from slimpipe.runtime.in_order_transport import InOrderDeadlock, InOrderWorld
from slimpipe.schedule import Link
from slimpipe.train.session import Session
from tests.numerics.harness import RankReport, batch_of, case, config_of, report, roughen
from tests.support.cover import Case, all_supported
from tests.support.pool import Pool


def run_in_threads(case: Case, communicator: Callable[[Link], Hashable] = lambda link: link) -> list[RankReport]:
    """The case's reports by rank. No process group: a loss or tied gradient that ranks share is each one's own part."""
    world = InOrderWorld(case.pp, communicator)

    def one_rank(rank: int) -> RankReport:
        try:
            session = Session(
                config_of(case),
                transport=world.transport(rank),
                collectives=world.collectives(rank),
                exchange_traffic=world.exchange(rank),
                rank=rank,
            )
            roughen(session.weights())
            return report(session, session.step_gradients(*batch_of(case)))
        finally:
            world.leave(rank)

    with ThreadPoolExecutor(case.pp) as threads:
        ranks = [threads.submit(one_rank, rank) for rank in range(case.pp)]
        return [rank.result() for rank in ranks]


def in_threads(rank: int, world: int, case: Case) -> list[RankReport]:
    return run_in_threads(case)


def one_communicator_a_direction(rank: int, world: int, case: Case) -> str:
    """What the deadlock says, if there is one."""
    try:
        run_in_threads(case, lambda link: link.kind)
    except InOrderDeadlock as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", [case for case in all_supported() if case.pp > 1], ids=str)
def test_gradients_are_bitwise_those_of_the_distributed_run(
    case: Case, pool: Callable[[int], Pool], reports: Callable[[Case], list[RankReport]]
) -> None:
    (threads,) = pool(1).run(in_threads, case)
    assert sum(report.loss for report in threads) == reports(case)[0].loss
    if case.tied:
        first, last = (threads[rank].gradients for rank in (0, -1))
        first["embedding.weight"] = last["embedding.weight"] = first["embedding.weight"] + last["embedding.weight"]
    for ours, theirs in zip(threads, reports(case), strict=True):
        assert ours.gradients.keys() == theirs.gradients.keys()
        assert all(torch.equal(ours.gradients[name], theirs.gradients[name]) for name in ours.gradients)
        assert (ours.peak_units, ours.peak_kv_slots) == (theirs.peak_units, theirs.peak_kv_slots)


def test_the_transport_would_show_what_gloo_does_not(pool: Callable[[int], Pool]) -> None:
    """One communicator for all links of a direction deadlocks with v = 2: the wrap p-1 -> 0 queues with r -> r+1."""
    (message,) = pool(1).run(one_communicator_a_direction, case(pp=2, v=2, n=4, m=2))
    assert message.count("waits to") == 2
