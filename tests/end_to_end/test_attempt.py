"""Processes that are started again find a store without what the dead have left in it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from slimpipe.parallel.attempt import fresh_store


def attempt(store: dist.Store, world: int) -> list[dist.Store]:
    with ThreadPoolExecutor(world) as ranks:
        return list(ranks.map(lambda rank: fresh_store(store, rank, world), range(world)))


def test_all_ranks_of_an_attempt_share_a_store_that_others_have_not_seen() -> None:
    store = dist.HashStore()
    for number in range(3):
        stores = attempt(store, 3)
        assert not any(part.check(["address"]) for part in stores), f"attempt {number} finds what is left of another"
        stores[1].set("address", str(number))
        assert [part.get("address") for part in stores] == [str(number).encode()] * 3


def test_a_question_of_the_dead_misleads_nobody() -> None:
    """Rank 2 died after it had asked; in the next attempt its question is there before that of its successor."""
    store = dist.HashStore()
    store.set("question of 2", "of the dead")
    first = attempt(store, 3)
    first[0].set("address", "first")
    assert first[2].get("address") == b"first"


def test_who_does_not_come_is_named() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(TimeoutError, match=r"^ranks \[1, 2\] have not joined the job after 0.2 s$"):
        fresh_store(store, 0, 3)
