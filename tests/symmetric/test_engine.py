"""Whole steps over lanes: gradients are bitwise those of the in-order transport, which are the distributed run's.

Ranks are threads, whose host is their compute stream; what they receive comes on streams of their own, late by chance.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from slimpipe.runtime.in_order_transport import InOrderWorld
from slimpipe.runtime.symmetric.collectives import Sizes, SymmetricCollectives
from slimpipe.runtime.symmetric.exchange import SymmetricExchange
from slimpipe.runtime.symmetric.transport import SymmetricTransport
from slimpipe.schedule import links
from slimpipe.train.planning import make_plan
from slimpipe.train.session import Session
from tests.numerics.harness import RankReport, batch_of, case, config_of, report, roughen
from tests.numerics.in_order import in_threads
from tests.support.cover import Case
from tests.support.pool import Pool
from tests.support.random_states import one_thread_at_a_time
from tests.support.shared_memory import Node, ended

CASES = [
    case(pp=2, n=4, m=2, tied=True),
    case(pp=3, v=2, n=4, m=2, vocab_parallel=True),
    case(pp=3, n=8, m=2, exchange="balanced", granule=2, vocab_parallel=True, mask="ragged"),
    case(pp=4, n=8, m=2, exchange="balanced", granule=2, recompute="full"),
]


def over_lanes(rank: int, world: int, case: Case) -> list[RankReport]:
    """The case's reports by rank."""
    node, others = Node(range(case.pp), slowest=0.0005), InOrderWorld(case.pp)
    config = config_of(case)
    planned = make_plan(config)
    devices = [node.device(hosted=True) for _ in node.ranks]
    shape = (config.train.micro_batch, config.data.sequence_length // config.shape.n, config.model.hidden_size)

    hidden = 4 * torch.Size(shape).numel()
    sizes = Sizes(hidden, hidden, statistics=12 * shape[0] * shape[1])

    def one_rank(rank: int) -> RankReport:
        make, cpu = node.make_arena(rank), torch.device("cpu")
        try:
            session = Session(
                config,
                transport=SymmetricTransport(
                    links(planned.plan), rank, shape, torch.float32, cpu, devices[rank], make, planned.send_window
                ),
                collectives=SymmetricCollectives(case.pp, rank, devices[rank], make, sizes, cpu)
                if case.vocab_parallel
                else others.collectives(rank),
                # Smaller than some tensors: they go in parts, and rings are full.
                exchange_traffic=SymmetricExchange(node.ranks, rank, devices[rank], make, {}, least=1024),
                rank=rank,
            )
            roughen(session.weights())
            return report(session, session.step_gradients(*batch_of(case)))
        finally:
            others.leave(rank)

    with one_thread_at_a_time(), ended(devices), ThreadPoolExecutor(case.pp) as threads:
        ranks = [threads.submit(one_rank, rank) for rank in range(case.pp)]
        return [found.result() for found in ranks]


@pytest.mark.parametrize("layout", CASES, ids=str)
def test_gradients_are_bitwise_those_of_a_transport_without_lanes(layout: Case, pool: Callable[[int], Pool]) -> None:
    (lanes,), (apart,) = pool(1).run(over_lanes, layout), pool(1).run(in_threads, layout)
    for shared, plain in zip(lanes, apart, strict=True):
        assert shared.loss == plain.loss
        assert shared.gradients.keys() == plain.gradients.keys()
        assert all(torch.equal(shared.gradients[name], plain.gradients[name]) for name in plain.gradients)
