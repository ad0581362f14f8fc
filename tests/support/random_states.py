"""Ranks as threads may not ask for torch's random state at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


@contextmanager
def one_thread_at_a_time() -> Iterator[None]:
    """For threads that ask for the state of the host's generator, as blocks do that run twice.

    torch holds the generator's mutex while it makes a Python object of the state. Python may collect garbage for that,
    and a finalizer in Python may hand the interpreter to another thread; if that one asks for the state as well, it
    waits for the mutex with the interpreter in its hands, and both wait for ever.
    """
    lock = threading.Lock()

    def locked(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with lock:
                return function(*args)

        return call

    with (
        mock.patch.object(torch, "get_rng_state", locked(torch.get_rng_state)),
        mock.patch.object(torch, "set_rng_state", locked(torch.set_rng_state)),
    ):
        yield
