"""Runs cases one after the other in one torchrun job: imports, compiled kernels and the machine are warmed up once.

Every case has a time limit. A case that fails or outlasts it ends the job; its reason is its row, and the cases that
are left go on in a new job.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slimpipe.config import Config
from slimpipe.parallel.mesh import Processes, pick_carrier, prepare_process
from slimpipe.runtime.carrier import Carrier

GRACE = 45.0
"""Seconds for torchrun to end its ranks; it gives them 30."""
TELLING = 2.0
"""Seconds for the ranks of a case that is late to print their stacks."""
CRASHED = "Fatal Python error"
Case = dict[str, Any]
Measure = Callable[[Config, Case, Processes], dict[str, Any] | None]
"""Carries out one case on one rank, in a process group of its own; rank 0's is the row."""


def run(
    module: str,
    cases: list[tuple[str, Case]],
    ranks: int,
    limit: float,
    environment: Mapping[str, str] | None = None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, row) of each case as it ends. `module` is started as `python -m` with `--worker FILE`, and must hand the
    file to `work`; `limit`: seconds a case, start of the job included; `environment`: variables of the job's own.

    Who stops asking for rows ends the job."""
    left = list(cases)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            file, errors = Path(folder) / "cases.json", Path(folder) / "errors"
            file.write_text(json.dumps({"cases": left}), encoding="utf-8")
            command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
            with errors.open("w", encoding="utf-8") as sink:
                job = subprocess.Popen(
                    [*command, "-m", module, "--worker", str(file)],
                    stdout=subprocess.PIPE,
                    stderr=sink,
                    text=True,
                    start_new_session=True,
                    env={**os.environ, **(environment or {})},
                )
                late = False
                pids: list[int] = []
                try:
                    for line in _lines(job, limit):
                        if line is None:
                            late = True
                            _ask_for_stacks(pids)
                            break
                        if line.startswith("PID "):
                            pids.append(int(line.removeprefix("PID ")))
                        if line.startswith("PROFILE"):
                            print(line, flush=True)
                        if line.startswith("ROW "):
                            yield left.pop(0)[0], json.loads(line.removeprefix("ROW "))
                finally:
                    _end(job)
            said = errors.read_text(encoding="utf-8", errors="replace")
            # A rank that crashed has told its stack before torchrun told at length of the others.
            print(said[-24000 if late or CRASHED in said else -4000 :], file=sys.stderr, flush=True)
            if left:
                yield left.pop(0)[0], {"failed": f"stopped after {limit:.0f} s" if late else _reason(said)}


def tell_stacks_when_asked() -> None:
    """In a rank: at a crash too."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    print(f"PID {os.getpid()}", flush=True)


def _ask_for_stacks(pids: list[int]) -> None:
    """Of ranks that are stopped next. Not by `faulthandler.dump_traceback_later`: that reads the frames of a process
    that runs on, which has ended one (docs/log.md, 2026-11-30)."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(TELLING)


def _end(job: subprocess.Popen[str]) -> None:
    """Ends a job that has not ended by itself. Its ranks are sessions of their own: torchrun must end them."""
    if job.poll() is None:
        job.terminate()
        try:
            job.wait(GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
    job.wait()


def _lines(job: subprocess.Popen[str], limit: float) -> Iterator[str | None]:
    """What the job prints, until it ends; None, and no more, once it has printed no row for `limit` seconds."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert job.stdout is not None
        for line in job.stdout:
            lines.put(line.rstrip("\n"))
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    deadline = time.monotonic() + limit
    while True:
        try:
            line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            yield None
            return
        if line is None:
            return
        if line.startswith("ROW "):
            deadline = time.monotonic() + limit
        yield line


def _reason(said: str) -> str:
    lines = (re.sub(r"^(\[rank\d+\]:\s*)+", "", line).strip() for line in said.splitlines())
    # The last line of a traceback, not a line of code in it.
    named = [line for line in lines if re.match(r"[\w.]+Error\b", line) and "ChildFailedError" not in line]
    memory = [line for line in named if "OutOfMemory" in line or "out of memory" in line]
    crashed = [line.strip() for line in said.splitlines() if CRASHED in line]
    return (memory or named or crashed or ["no row and no error"])[0][:240]


def work(file: Path, config_of: Callable[[Case], Config], measure: Measure) -> None:
    """One rank, under torchrun: every case of the file, each in a process group of its own."""
    tell_stacks_when_asked()
    given = json.loads(file.read_text(encoding="utf-8"))
    cases: list[tuple[str, Case]] = given["cases"]
    store, rank, world = next(dist.rendezvous("env://"))
    for index, (name, case) in enumerate(cases):
        config = config_of(case)
        prepare_process(config)
        carrier: Carrier = pick_carrier(config, int(os.environ["LOCAL_RANK"]))
        if carrier.device.type == "cuda":
            torch.cuda.set_device(carrier.device)
        own = dist.PrefixStore(f"case {index}", store)
        dist.init_process_group(carrier.backend, store=own, rank=rank, world_size=world, timeout=timedelta(seconds=180))
        row = measure(config, case, Processes(rank, world, carrier, own))
        dist.barrier()
        if rank == 0:
            print(f"case {name} done", file=sys.stderr, flush=True)
            print("ROW " + json.dumps(row), flush=True)
        dist.destroy_process_group()
        gc.collect()
        if carrier.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
