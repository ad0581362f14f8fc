"""The transport with NCCL's in-order rule deadlocks where NCCL would."""

from __future__ import annotations

from collections.abc import Callable

from slimpipe.runtime.in_order_transport import InOrderDeadlock
from tests.numerics.harness import case
from tests.numerics.in_order import run_in_threads
from tests.support.cover import Case
from tests.support.pool import Pool


def one_communicator_a_direction(rank: int, world: int, case: Case) -> str:
    """What the deadlock says, if there is one."""
    try:
        run_in_threads(case, lambda link: link.kind)
    except InOrderDeadlock as error:
        return str(error)
    return ""


def test_the_transport_would_show_what_gloo_does_not(pool: Callable[[int], Pool]) -> None:
    """One communicator for all links of a direction deadlocks with v = 2: the wrap p-1 -> 0 queues with r -> r+1."""
    (message,) = pool(1).run(one_communicator_a_direction, case(pp=2, v=2, n=4, m=2))
    assert message.count("waits to") == 2
