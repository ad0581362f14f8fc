"""A case on a transport with NCCL's in-order rule: a green gloo run says nothing about NCCL's order.

The ranks are threads of one process; what they compute must be the distributed run's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor

from slimpipe.runtime.in_order_transport import InOrderWorld
from slimpipe.schedule import Link
from slimpipe.train.session import Session
from tests.numerics.harness import RankReport, batch_of, config_of, report, roughen
from tests.support.cover import Case
from tests.support.random_states import one_thread_at_a_time


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

    with one_thread_at_a_time(), ThreadPoolExecutor(case.pp) as threads:
        ranks = [threads.submit(one_rank, rank) for rank in range(case.pp)]
        return [rank.result() for rank in ranks]


def in_threads(rank: int, world: int, case: Case) -> list[RankReport]:
    return run_in_threads(case)
