"""Runs cases one after the other in one torchrun job: imports, compiled kernels and the machine are warmed up once.

Every case has a time limit. A case that fails or outlasts it ends the job; its reason is its row, and the cases that
are left go on in a new job.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slimpipe.config import Config
from slimpipe.parallel.mesh import Processes, pick_carrier, prepare_process
from slimpipe.runtime.carrier import Carrier

Case = dict[str, Any]
Measure = Callable[[Config, Case, Processes], dict[str, Any] | None]
"""Carries out one case on one rank, in a process group of its own; rank 0's is the row."""


def run(module: str, cases: list[tuple[str, Case]], ranks: int, limit: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, row) of each case as it ends. `module` is started as `python -m` with `--worker FILE`, and must hand the
    file to `work`; `limit`: seconds a case, start of the job included."""
    left = list(cases)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            file, errors = Path(folder) / "cases.json", Path(folder) / "errors"
            file.write_text(json.dumps(left), encoding="utf-8")
            command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
            with errors.open("w", encoding="utf-8") as sink:
                job = subprocess.Popen(
                    [*command, "-m", module, "--worker", str(file)],
                    stdout=subprocess.PIPE,
                    stderr=sink,
                    text=True,
                    start_new_session=True,
                )
                for line in _lines(job, limit):
                    if line.startswith("PROFILE"):
                        print(line, flush=True)
                    if line.startswith("ROW "):
                        yield left.pop(0)[0], json.loads(line.removeprefix("ROW "))
            said = errors.read_text(encoding="utf-8", errors="replace")
            print(said[-4000:], file=sys.stderr, flush=True)
            if left:
                late = f"stopped after {limit:.0f} s" if job.returncode == -signal.SIGKILL else None
                yield left.pop(0)[0], {"failed": late or _reason(said)}


def _lines(job: subprocess.Popen[str], limit: float) -> Iterator[str]:
    """What the job prints, until it ends or prints no row for `limit` seconds; then it is killed."""
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
            os.killpg(job.pid, signal.SIGKILL)
            break
        if line is None:
            break
        if line.startswith("ROW "):
            deadline = time.monotonic() + limit
        yield line
    job.wait()


def _reason(said: str) -> str:
    named = [line.strip() for line in said.splitlines() if "Error" in line and "ChildFailedError" not in line]
    memory = [line for line in named if "OutOfMemory" in line or "out of memory" in line]
    return (memory or named or ["no row and no error"])[0][:240]


def work(file: Path, config_of: Callable[[Case], Config], measure: Measure) -> None:
    """One rank, under torchrun: every case of the file, each in a process group of its own."""
    faulthandler.enable()
    cases: list[tuple[str, Case]] = json.loads(file.read_text(encoding="utf-8"))
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
