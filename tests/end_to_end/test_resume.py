"""Runs that are stopped and started again by the launchers that people use: scripts/train.sh, torchrun's restarts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.end_to_end.launch import QUICKSTART, ROOT, slimpipe
from tests.support.failing_models import MISBEHAVIOUR

LIMIT = 120.0


def steps_of(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def script(*arguments: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MASTER_", "NNODES", "NPROC"))}
    return subprocess.Popen(
        ["bash", str(ROOT / "scripts/train.sh"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**kept, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize(("name", "ranks"), [("SIGTERM", 2), ("SIGINT", 1)])
def test_the_script_passes_a_signal_on_and_the_success_back(
    name: str, ranks: int, small: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    keys = ["train.steps=100000", "train.device=cpu", f"parallel.pp={ranks}"]
    job = script(QUICKSTART, *small, *keys, f"train.output={run}")
    end = time.monotonic() + LIMIT
    while time.monotonic() < end and not ((run / "metrics.jsonl").exists() and len(steps_of(run)) >= 2):
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.05)
    job.send_signal(getattr(signal, name))
    said, _ = job.communicate(timeout=LIMIT)
    assert job.returncode == 0, said
    step = len(steps_of(run))
    assert f"stopped by {name} after step {step} of 100000: the same command goes on from here" in said.splitlines()
    assert steps_of(run) == list(range(1, step + 1))
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step_{step}"]


def test_a_signal_while_torchrun_starts_is_not_lost(small: list[str], tmp_path: Path) -> None:
    """SIGINT as soon as there is a torchrun: a script's background jobs ignore it, and the run would go on for good."""
    job = script(QUICKSTART, *small, "train.steps=100000", "train.device=cpu", f"train.output={tmp_path / 'run'}")
    end = time.monotonic() + LIMIT
    started = False
    while not started and time.monotonic() < end:
        assert job.poll() is None, job.communicate()[0]
        for child in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split():
            with contextlib.suppress(OSError):
                started |= b"torch.distributed.run" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        time.sleep(0.01)
    assert started
    job.send_signal(signal.SIGINT)
    try:
        said, _ = job.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        job.terminate()  # which it passes on
        raise AssertionError(f"the run goes on\n{job.communicate(timeout=LIMIT)[0]}") from None
    assert job.returncode != 0 and "step " not in said, said


def test_the_script_passes_a_failure_on(small: list[str], tmp_path: Path) -> None:
    keys = ["train.device=cpu", "parallel.pp=1", "model.vocab_size=100"]
    job = script(QUICKSTART, *small, *keys, f"train.output={tmp_path}")
    said, _ = job.communicate(timeout=LIMIT)
    assert job.returncode != 0 and "model.vocab_size = 100" in said, said


def test_torchruns_restart_goes_on_from_the_last_checkpoint(small: list[str], tmp_path: Path) -> None:
    """Rank 1 kills itself in its third step, in the first attempt only."""
    run = tmp_path / "run"
    model = "model.name=tests.support.failing_models:Misbehaving"
    keys = ["train.steps=5", "train.checkpoint_every=1", "train.async_checkpoint=false"]
    finished = slimpipe(
        *("train", QUICKSTART, *small, model, *keys, f"train.output={run}"),
        ranks=2,
        restarts=1,
        **{MISBEHAVIOUR: "die 6 2 5"},
    )
    assert finished.code == 0, finished.err
    assert re.findall(r"^resumed from .*/step_(\d): step (\d) of 5 is next$", finished.out, re.MULTILINE) == [
        ("2", "3")
    ]
    assert steps_of(run) == [1, 2, 3, 4, 5]
    assert "No such file" not in finished.err
