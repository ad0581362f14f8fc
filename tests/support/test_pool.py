"""The pool: results by rank, and what it says and does when a rank raises, dies or hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import Pool, PoolError, Workers


@pytest.fixture(scope="module")
def own() -> Iterator[Workers]:
    """Workers apart from the session's, for they do not survive these tests."""
    workers = Workers()
    yield workers
    workers.close()


def add_up(rank: int, world: int, start: float) -> tuple[torch.Tensor, int, int]:
    total = torch.tensor([start + rank])
    dist.all_reduce(total)
    return total, os.getpid(), torch.get_num_threads()


def round_trip(rank: int, world: int, rounds: int) -> float:
    """A ring on two further groups, as an engine's links are."""
    groups = [dist.new_group(list(range(world))) for _ in range(2)]
    value = torch.tensor([float(rank)])
    for i in range(rounds):
        received = torch.empty(1)
        send = dist.isend(value, (rank + 1) % world, group=groups[i % 2])
        dist.recv(received, (rank - 1) % world, group=groups[i % 2])
        assert send is not None
        send.wait()
        value = received
    return float(value)


def raise_on(rank: int, world: int, bad: int) -> None:
    if rank == bad:
        raise ValueError(f"rank {rank} has had enough")
    dist.barrier()


def die_on(rank: int, world: int, bad: int) -> None:
    if rank == bad:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def wait_for_nobody(rank: int, world: int) -> None:
    if rank == 1:
        dist.recv(torch.empty(1), 0)  # a missing send
    a_pause_worth_naming() if rank == 0 else None


def a_pause_worth_naming() -> None:
    time.sleep(300)


def give_what_cannot_be_pickled(rank: int, world: int) -> Callable[[], None]:
    return lambda: None


def test_results_come_by_rank_from_lasting_single_threaded_processes(pool: Callable[[int], Pool]) -> None:
    first, second = (pool(3).run(add_up, start) for start in (1.0, 2.0))
    assert [float(total) for total, _, _ in first] == [6, 6, 6]
    assert [float(total) for total, _, _ in second] == [9, 9, 9]
    assert [pid for _, pid, _ in first] == [pid for _, pid, _ in second]
    assert len({pid for _, pid, _ in first} | {os.getpid()}) == 4
    assert {threads for _, _, threads in first} == {1}
    assert [float(total) for total, _, _ in pool(1).run(add_up, 5.0)] == [5]


def test_every_run_has_groups_of_its_own(pool: Callable[[int], Pool]) -> None:
    for world in (2, 4, 3):
        assert pool(world).run(round_trip, world + 1) == [(rank - 1) % world for rank in range(world)]


@pytest.mark.parametrize("bad", [0, 1])
def test_an_exception_comes_back_with_its_rank_and_traceback(own: Workers, bad: int) -> None:
    begin = time.monotonic()
    with pytest.raises(PoolError) as caught:
        Pool(own, 2).run(raise_on, bad, timeout=180)
    text = str(caught.value)
    assert "raise_on on 2 ranks" in text and f"ValueError: rank {bad} has had enough" in text
    assert f"--- rank {bad}: raised" in text and "in raise_on" in text
    assert f"--- rank {1 - bad}: still running" in text
    assert time.monotonic() - begin < 30


def test_a_dead_rank_is_named_with_its_last_words(own: Workers) -> None:
    with pytest.raises(PoolError, match=r"rank 1: died, exit code -9\s+last words"):
        Pool(own, 2).run(die_on, 1)


def test_a_hang_shows_every_ranks_stack_and_the_next_run_works(own: Workers) -> None:
    Pool(own, 2).run(add_up, 1.0)  # workers are started, which may take longer than what follows
    with pytest.raises(PoolError) as caught:
        Pool(own, 2).run(wait_for_nobody, timeout=3)
    text = str(caught.value)
    assert text.count("still running when the time was up") == 2
    assert "a_pause_worth_naming" in text and "in wait_for_nobody" in text and "in recv" in text
    assert [float(total) for total, _, _ in Pool(own, 2).run(add_up, 1.0)] == [3, 3]


def test_a_result_that_cannot_be_sent_is_an_error_of_that_rank(own: Workers) -> None:
    with pytest.raises(PoolError, match="rank 0: raised"):
        Pool(own, 1).run(give_what_cannot_be_pickled)
