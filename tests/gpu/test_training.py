"""Whole runs on two GPUs by the launcher that people use: tens of steps with evaluations and checkpoints, one of them
stopped by a signal and started again, over NCCL and over memory that the GPUs share. Bits must be equal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.launch import QUICKSTART, ROOT

pytestmark = pytest.mark.gpu
STEPS, STOPPED_AT, LIMIT = 60, 25, 150.0
KEYS = [
    "model.hidden_size=512",
    "model.layers=8",
    "model.intermediate_size=1024",
    "model.vocab_size=1024",
    "pipeline.slices=4",
    "pipeline.virtual_stages=2",
    "pipeline.exchange=balanced",
    "memory.recompute=norms",
    "memory.swap=0.5",
    "data.sequence_length=4096",
    "data.eval_share=0.1",
    f"train.steps={STEPS}",
    "train.global_batch=4",
    "train.micro_batch=1",
    "train.checkpoint_every=20",
    "train.eval_every=20",
    "train.eval_batches=2",
    "train.deterministic=true",
    "train.watchdog_seconds=60",
]
NCCL = ["train.device=cuda", "train.dtype=bfloat16", "parallel.carrier=nccl"]
AUTO = NCCL[:-1]  # which shares memory between two GPUs


def start(run: Path, corpus: Path, keys: list[str]) -> subprocess.Popen[str]:
    """scripts/train.sh, what it says in `run`.log."""
    sources = [f"data.corpus={corpus}", f"data.cache_dir={run}.cache", f"train.output={run}"]
    with Path(f"{run}.log").open("a", encoding="utf-8") as said:
        return subprocess.Popen(
            ["bash", str(ROOT / "scripts/train.sh"), QUICKSTART, *KEYS, *keys, *sources],
            stdout=said,
            stderr=subprocess.STDOUT,
            text=True,
            env={name: value for name, value in os.environ.items() if not name.startswith(("MASTER_", "NNODES"))},
        )


def lines(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def await_end(job: subprocess.Popen[str], run: Path) -> None:
    try:
        code = job.wait(LIMIT)
    except subprocess.TimeoutExpired:
        job.terminate()
        raise AssertionError(f"no end\n{said(run)}") from None
    assert code == 0, said(run)


def said(run: Path) -> str:
    return Path(f"{run}.log").read_text(encoding="utf-8")[-6000:]


def stopped_and_started(run: Path, corpus: Path, keys: list[str]) -> None:
    """A run that SIGTERM stops behind step STOPPED_AT, and the same command again."""
    job = start(run, corpus, keys)
    end = time.monotonic() + LIMIT
    while time.monotonic() < end and sum("loss" in line for line in lines(run)) < STOPPED_AT:
        assert job.poll() is None, said(run)
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    await_end(job, run)
    assert STOPPED_AT <= max(line["step"] for line in lines(run)) < STEPS, said(run)
    await_end(start(run, corpus, keys), run)


def numbers(run: Path) -> list[tuple[Any, ...]]:
    """What must be equal of every line."""
    return [tuple(line.get(key) for key in ("step", "loss", "grad_norm", "eval_loss")) for line in lines(run)]


def corpus_at(folder: Path) -> Path:
    library = Path(sysconfig.get_paths()["stdlib"])
    text = "".join((library / name).read_text(encoding="utf-8") for name in ("argparse.py", "typing.py", "inspect.py"))
    (folder / "text.py").write_text(text * 4, encoding="utf-8")
    return folder / "text.py"


def test_a_run_over_shared_memory_stopped_and_started_equals_one_over_nccl(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, here {torch.cuda.device_count()}")
    over_nccl, shared = tmp_path / "nccl", tmp_path / "shared"
    corpus = corpus_at(tmp_path)
    beside = start(over_nccl, corpus, NCCL)  # times mean nothing here
    stopped_and_started(shared, corpus, AUTO)
    await_end(beside, over_nccl)
    assert "symmetric memory" in lines(shared)[0]["carriers"]
    assert "NCCL" in lines(over_nccl)[0]["carriers"]
    assert numbers(shared) == numbers(over_nccl)
    evaluations = [line["eval_loss"] for line in lines(shared) if "eval_loss" in line]
    losses = [line["loss"] for line in lines(shared) if "loss" in line]
    print(f"\n{len(losses)} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}; evaluations {evaluations}")
    assert len(losses) == STEPS and len(evaluations) >= 3
    assert losses[-1] < 0.9 * losses[0] and evaluations[-1] < evaluations[0]
