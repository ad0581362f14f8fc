"""Python's garbage collector, out of the way while a plan is made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """No collection of cycles meanwhile, in this process; as before behind it. A decorator too.

    A plan is millions of tuples in no cycle, all of which stay: to look through them again and again takes a quarter of
    the time (docs/log.md, 2026-11-30).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
