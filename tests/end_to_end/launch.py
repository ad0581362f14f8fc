"""Starts `slimpipe` as a user does: as a process of its own, or under torchrun."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs/quickstart.yaml")

_OF_A_JOB = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MARK = "SLIMPIPE_TEST_JOB"


@dataclass(frozen=True)
class Finished:
    """A job that has ended, with every process of it."""

    code: int
    out: str
    err: str


def slimpipe(*arguments: str, ranks: int = 1, limit: float = 120, restarts: int = 0, **environment: str) -> Finished:
    """`slimpipe arguments`, alone or by torchrun on `ranks` processes, which it starts again up to `restarts` times.

    Raises AssertionError with what it has said where it has not ended after `limit` seconds (a hang: the runs of these
    tests take some ten), or where a process of it outlives it.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    torchrun = [*launcher, "--max-restarts", str(restarts)] if ranks > 1 else []
    kept = {name: value for name, value in os.environ.items() if name not in _OF_A_JOB}
    mark = uuid.uuid4().hex
    job = subprocess.Popen(
        [sys.executable, *torchrun, "-m", "slimpipe", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", _MARK: mark, **environment},
    )
    try:
        # Returns when every process that holds the pipes has ended, not just the launcher.
        out, err = job.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        _end(job, mark)
        out, err = job.communicate()
        raise AssertionError(f"{' '.join(arguments)}: still running after {limit:g} s\n{out}\n{err}") from None
    left_over = list(_processes(mark))
    _end(job, mark)
    assert not left_over, f"{' '.join(arguments)}: {len(left_over)} processes outlive the job\n{out}\n{err}"
    return Finished(job.returncode, out, err)


def _processes(mark: str) -> Iterator[int]:
    """Processes that were started with this mark in their environment (on systems with /proc)."""
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{_MARK}={mark}".encode() in (place / "environ").read_bytes().split(b"\0"):
                yield int(place.name)


def _end(job: subprocess.Popen[str], mark: str) -> None:
    job.kill()
    for process in _processes(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
