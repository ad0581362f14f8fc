"""Processes forked from one that has imported torch already: its import takes longer than most tests do."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext
from typing import Final

# torch's optimizers import `torch._dynamo` when the first is made, which takes as long as torch itself.
_IMPORTED: Final = ["torch._dynamo", "slimpipe.cli", "slimpipe.train.main", "tests.support.jobs", "tests.support.pool"]


def forking() -> ForkServerContext:
    """The one server of this process; it starts with the first process that is asked for, and ends with this one."""
    context = multiprocessing.get_context("forkserver")
    assert isinstance(context, ForkServerContext)
    context.set_forkserver_preload(_IMPORTED)
    return context
