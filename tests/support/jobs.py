"""`slimpipe train` on several ranks, in processes forked from one that has imported torch already.

For tests that start a run many times. Each process is what torchrun would start: it calls `slimpipe.train.main.train`
in an environment of its own, and ends with the exit code that `slimpipe train` would have.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.distributed as dist

from tests.support.forking import forking

LIMIT = 120.0
"""Seconds; a hard limit against hangs."""


def nothing(rank: int) -> None:
    """What a process does beforehand."""


@dataclass
class Job:
    """Processes under way, what they print, and the store they meet in, which is gone with the job."""

    processes: list[BaseProcess]
    log: Path
    store: dist.Store

    def wait(self) -> list[int]:
        """Exit codes by rank. Raises AssertionError where one is still running after `LIMIT`."""
        for process in self.processes:
            process.join(LIMIT)
        hung = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        self.kill()
        assert not hung, f"ranks {hung} are still running\n{self.said}"
        return [process.exitcode or 0 for process in self.processes]

    def kill(self) -> None:
        """SIGKILL to all that are left, and their ends."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(LIMIT)

    @property
    def running(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


class Jobs:
    """Starts jobs, one after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        self._context = forking()

    def start(self, config: str, *overrides: str, ranks: int = 1, first: Callable[[int], None] = nothing) -> Job:
        """`slimpipe train config overrides` on `ranks` ranks, each of which calls `first(rank)` beforehand."""
        self._count += 1
        log = self._folder / f"job{self._count}.log"
        # As torchrun's agent has it. Its port is its own from the first, whatever else runs on the machine.
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        processes = [
            self._context.Process(target=_work, args=(rank, ranks, store.port, log, config, overrides, first))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        return Job(list(processes), log, store)

    def run(self, config: str, *overrides: str, ranks: int = 1, first: Callable[[int], None] = nothing) -> Job:
        """A job that has ended."""
        job = self.start(config, *overrides, ranks=ranks, first=first)
        job.wait()
        return job


def _work(
    rank: int, ranks: int, port: int, log: Path, config: str, overrides: Sequence[str], first: Callable[[int], None]
) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if ranks > 1:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(ranks),
            MASTER_ADDR="localhost",
            MASTER_PORT=str(port),
            TORCHELASTIC_USE_AGENT_STORE="True",
            TORCHELASTIC_RESTART_COUNT="0",
        )
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"

    import torch

    from slimpipe import telling
    from slimpipe.cli import app

    torch.set_num_threads(1)
    # There is no launcher here that ends the other ranks when one has spoken.
    telling._LET_THE_FIRST_SPEAK = 0.0  # type: ignore[misc]
    first(rank)
    try:
        code = app(["train", config, *overrides], standalone_mode=False) or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
