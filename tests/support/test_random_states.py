"""Threads that ask for the random state while garbage is collected."""

from __future__ import annotations

import gc
import sys
import threading

import torch

from tests.support.pool import Pool, Workers
from tests.support.random_states import one_thread_at_a_time


class Loop:
    """Garbage that only the collector finds, with a finalizer in Python."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        for _ in range(50):
            pass


def ask(times: int) -> None:
    for _ in range(times):
        Loop()
        torch.get_rng_state()


def ask_in_threads(rank: int, world: int) -> int:
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(3)
    try:
        with one_thread_at_a_time():
            threads = [threading.Thread(target=ask, args=(20000,)) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)
    return len(threads)


def test_they_do_not_wait_for_each_other() -> None:
    """Without the lock this hangs within a second. In workers of its own: what hangs is ended with them."""
    workers = Workers()
    try:
        assert Pool(workers, 1).run(ask_in_threads, timeout=60) == [3]
    finally:
        workers.close()
