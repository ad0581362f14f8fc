"""A fresh store for each attempt at a job.

torchrun's agent may hand the workers that it starts again the store of those that died, with their addresses in it, and
a new process would then call an old one (seen with torch 2.13). Its count of restarts does not help: after a failure on
one node, the agents of the others do not count the restart. So rank 0 names the attempt.
"""

from __future__ import annotations

import time
import uuid
from typing import Final

import torch.distributed as dist

_PAUSE: Final = 0.02  # seconds


def fresh_store(store: dist.Store, rank: int, world: int) -> dist.Store:
    """A part of `store` that nothing but this attempt of these `world` processes has written to. Collective.

    Raises where a process does not come within the store's own time limit.
    """
    return dist.PrefixStore(f"attempt {_lead(store, world) if rank == 0 else _follow(store, rank)}", store)


def _lead(store: dist.Store, world: int) -> str:
    """Answers every question by this attempt's name until all have it. Questions of the dead get an answer too."""
    name, answered = uuid.uuid4().hex, {rank: b"" for rank in range(1, world)}
    limit: float = store.timeout.total_seconds()  # type: ignore[attr-defined]
    end = time.monotonic() + limit
    while answered:
        if time.monotonic() >= end:
            raise TimeoutError(f"ranks {sorted(answered)} have not joined the job after {limit:g} s")
        for rank in list(answered):
            if store.check([f"{name} known to {rank}"]):
                del answered[rank]
            elif store.check([f"question of {rank}"]):
                question = store.get(f"question of {rank}")
                if question != answered[rank]:
                    store.set(f"answer to {question.decode()}", name)
                    answered[rank] = question
        time.sleep(_PAUSE)
    return name


def _follow(store: dist.Store, rank: int) -> str:
    question = uuid.uuid4().hex
    store.set(f"question of {rank}", question)
    name: str = store.get(f"answer to {question}").decode()  # waits for it
    store.set(f"{name} known to {rank}", "")
    return name
