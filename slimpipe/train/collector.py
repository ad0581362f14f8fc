"""Python's garbage collector, spared what a run has before its first step."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heap_set_aside() -> Iterator[None]:
    """What the process holds by now is looked through once more, and not again until the end.

    A full collection looks at every object there is, and what steps make brings one on now and then: with torch's and
    Triton's modules loaded it takes tenths of a second (docs/measurements.md, "How short a slice may be"), in which a
    GPU runs dry, and with it all ranks that wait for this one. What steps make is collected as ever.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
