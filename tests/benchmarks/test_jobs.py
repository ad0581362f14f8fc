"""A rank that stands still or crashes says where."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import jobs

RANK = """
import os, signal, time
from benchmarks import jobs
def standing_still():
    print("ready", flush=True)
    time.sleep(100)
def crashing():
    os.kill(os.getpid(), signal.SIGSEGV)
jobs.tell_stacks_when_asked()
"""


def rank(does: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", f"{RANK}{does}()"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_rank_that_is_late_prints_its_stack_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "TELLING", 0.0)
    with rank("standing_still") as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == f"PID {process.pid}\n"
        assert process.stdout.readline() == "ready\n"
        jobs._ask_for_stacks([process.pid, 2**22 + 1])  # one of them is gone
        said = "".join(process.stderr.readline() for _ in range(3))
        assert "in standing_still" in said
        assert process.poll() is None
        process.kill()


def test_a_crash_is_the_reason() -> None:
    with rank("crashing") as process:
        _, said = process.communicate(timeout=100)
    assert "in crashing" in said
    assert jobs._reason(said) == "Fatal Python error: Segmentation fault"
    assert (
        jobs._reason(said + "\ntorch.OutOfMemoryError: CUDA out of memory")
        == "torch.OutOfMemoryError: CUDA out of memory"
    )
