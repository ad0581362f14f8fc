"""Gloo worker processes that live as long as the test session, so that starting them is paid once a rank.

`Pool(4).run(function, *args)` runs `function(rank, world, *args)` on ranks 0..3 inside a fresh gloo process group and
returns the results by rank. An exception, a death or a hang on any rank raises `PoolError` with what every rank had to
say; whatever state the workers were in, the next run starts clean ones.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.support.forking import forking

START_TIMEOUT = 120.0
GRACE = 2.0
"""Seconds the other ranks get to finish or fail as well, once one has failed."""


class PoolError(AssertionError):
    """A run did not come back from every rank with a result."""


class Workers:
    """The processes behind all pools: worker i is rank i of any world that has one. Started on demand, in a batch."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slimpipe-pool-"))
        self._workers: list[_Worker] = []
        self._runs = 0

    def run(self, world: int, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        """Results of `function(rank, world, *args)` by rank."""
        self._start(world)
        self._runs += 1
        task = pickle.dumps((function, args))  # unpickled by the worker once it has this process's search path
        message = pickle.dumps((list(sys.path), world, str(self.folder / f"store{self._runs}"), timeout, task))
        workers = self._workers[:world]
        for worker in workers:
            worker.begin(message)
        outcomes = self._collect(workers, timeout)
        if all(kind == "result" for kind, _ in outcomes):
            return [value for _, value in outcomes]
        name = getattr(function, "__qualname__", repr(function))
        report = "\n".join(self._describe(rank, *outcome) for rank, outcome in enumerate(outcomes))
        self._stop()
        raise PoolError(f"{name} on {world} ranks failed:\n{report}")

    def _start(self, count: int) -> None:
        fresh = [_Worker(rank, self.folder) for rank in range(len(self._workers), count)]
        self._workers += fresh
        for worker in fresh:
            if not worker.connection.poll(START_TIMEOUT):
                log = worker.log_tail()
                self._stop()
                raise PoolError(f"worker {worker.rank} did not start within {START_TIMEOUT:g} s\n{log}")
            with contextlib.suppress(EOFError, OSError):
                worker.connection.recv_bytes()

    def _collect(self, workers: list[_Worker], timeout: float) -> list[tuple[str, Any]]:
        """One ("result" | "error" | "died" | "hung", value) a rank."""
        outcomes: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(outcomes) < len(workers) and (left := deadline - time.monotonic()) > 0:
            waiting = {w.connection: w for w in workers if w.rank not in outcomes}
            for connection in wait(list(waiting), timeout=left):
                worker = waiting[connection]  # type: ignore[index]
                outcomes[worker.rank] = worker.outcome()
                if outcomes[worker.rank][0] != "result":
                    deadline = min(deadline, time.monotonic() + GRACE)
        hung = [worker for worker in workers if worker.rank not in outcomes]
        for worker in hung:
            worker.dump_stacks()
        if hung:
            time.sleep(0.5)
        return [outcomes.get(worker.rank, ("hung", None)) for worker in workers]

    def _describe(self, rank: int, kind: str, value: Any) -> str:
        log = self._workers[rank].log_tail()
        if kind == "result":
            return f"--- rank {rank}: finished"
        if kind == "error":
            return f"--- rank {rank}: raised\n{value}{log}"
        if kind == "died":
            return f"--- rank {rank}: died, {value}\n{log}"
        return f"--- rank {rank}: still running when the time was up; its stacks:\n{log}"

    def _stop(self) -> None:
        for worker in self._workers:
            worker.stop()
        self._workers = []

    def close(self) -> None:
        """Ends every worker and removes their logs."""
        self._stop()
        shutil.rmtree(self.folder, ignore_errors=True)


class Pool:
    """Ranks 0 .. world - 1."""

    def __init__(self, workers: Workers, world: int) -> None:
        self.workers, self.world = workers, world

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        """Results by rank of `function(rank, world, *args)`, a picklable function of a module, run on every rank.

        Raises `PoolError` where a rank raises, dies, or has no result after `timeout` seconds.
        """
        return self.workers.run(self.world, function, args, timeout)


class _Worker:
    """The parent's end of one worker process."""

    def __init__(self, rank: int, folder: Path) -> None:
        context = forking()
        self.rank = rank
        self.log = folder / f"rank{rank}-{time.monotonic_ns()}.log"
        self.connection, far_end = context.Pipe()
        self.process = context.Process(target=_serve, args=(rank, far_end, str(self.log)), daemon=True)
        self.process.start()
        far_end.close()
        self._log_start = 0

    def begin(self, message: bytes) -> None:
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        with contextlib.suppress(OSError):  # a worker that has died meanwhile is seen when its outcome is read
            self.connection.send_bytes(message)

    def outcome(self) -> tuple[str, Any]:
        try:
            outcome: tuple[str, Any] = pickle.loads(self.connection.recv_bytes())
            return outcome
        except (EOFError, OSError):
            self.process.join(5)
            return "died", f"exit code {self.process.exitcode}"

    def dump_stacks(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.process.pid is not None:
                os.kill(self.process.pid, signal.SIGUSR1)

    def log_tail(self) -> str:
        """What the worker has printed since its last run began, at most 20,000 characters."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as stream:
            stream.seek(self._log_start)
            return stream.read().decode(errors="replace")[-20_000:]

    def stop(self) -> None:
        self.connection.close()
        if self.process.is_alive():
            self.process.kill()
        self.process.join(10)
        self.log.unlink(missing_ok=True)


def _serve(rank: int, connection: Connection, log: str) -> None:
    """A worker's life: reads runs until the parent goes away."""
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"

    import torch

    torch.set_num_threads(1)
    connection.send_bytes(b"ready")
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            outcome = pickle.dumps(("result", _run(rank, message)))
        except BaseException:
            outcome = pickle.dumps(("error", traceback.format_exc()))
        sys.stdout.flush()
        connection.send_bytes(outcome)


def _run(rank: int, message: bytes) -> Any:
    """One function inside a process group of its own.

    The group is taken down only when the next run begins: by then no rank needs it, nor does a barrier have to tell.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    search_path, world, store_file, timeout, task = pickle.loads(message)
    sys.path[:] = search_path
    function, args = pickle.loads(task)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    store = dist.FileStore(store_file, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout))
    return function(rank, world, *args)
