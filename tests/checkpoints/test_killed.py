"""A two-rank run killed 14 times at random moments and started again each time ends as the one that was left alone."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch

from slimpipe.train import checkpoint
from slimpipe.train.checkpoint import folders
from tests.checkpoints.conftest import checkpoints, losses, names
from tests.checkpoints.dying import DieAt
from tests.support.jobs import Job, Jobs

KILLS = 14
STEPS, EVERY = 60, 3


@pytest.mark.timeout(600)
def test_killed_at_random_it_goes_on_to_the_same_end_by_every_bit(jobs: Jobs, tiny: list[str], tmp_path: Path) -> None:
    settings = [*tiny, f"train.steps={STEPS}", f"train.checkpoint_every={EVERY}", "train.keep_every=30"]
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    assert jobs.run(*settings, f"train.output={alone}", ranks=2).wait() == [0, 0]

    chance = random.Random(20251129)
    reached, half_way = 0, 0
    for kill in range(KILLS):
        before = lines_of(killed / "metrics.jsonl")
        if kill % 2:
            # Whichever rank dies, the other goes with it, as the launcher has it.
            # A checkpoint is some 60 calls and pieces, the removal of an old one included.
            first = DieAt(chance.randrange(2), chance.randrange(1, 100))
            job = jobs.start(*settings, f"train.output={killed}", ranks=2, first=first)
            wait_until_it_dies(job)
        else:
            job = jobs.start(*settings, f"train.output={killed}", ranks=2)
            if kill % 6:
                wait_for_rows(job, killed / "metrics.jsonl", before + chance.randrange(1, 2 * EVERY))
            time.sleep(chance.random() * (0.1 if kill % 6 else 2.0))
        job.kill()
        if not (killed / "metrics.jsonl").exists():
            continue
        there = folders.found(killed)
        for folder in there:
            checkpoint.verify(folder)
        half_way += (
            any(name.startswith(".") for name in checkpoints(killed)) if (killed / "checkpoints").exists() else 0
        )
        newest = folders.step_of(there[0]) if there else 0
        assert newest >= reached, f"kill {kill} lost a checkpoint\n{job.said}"
        assert f"resumed from {folders.place(killed, reached)}:" in job.said or reached == 0 or newest == reached, (
            job.said
        )
        reached = newest
    assert half_way >= KILLS // 5, "too few of the kills came in the middle of a checkpoint for this to prove much"
    assert 0 < reached < STEPS

    job = jobs.run(*settings, f"train.output={killed}", ranks=2)
    assert f"resumed from {folders.place(killed, reached)}: step {reached + 1} of {STEPS} is next" in job.said
    assert losses(killed) == losses(alone)
    kept = names([30, STEPS - EVERY, STEPS])
    assert checkpoints(killed) == checkpoints(alone) == kept
    assert_same(checkpoint.place(killed, STEPS), checkpoint.place(alone, STEPS))


def wait_for_rows(job: Job, metrics: Path, count: int) -> None:
    while job.running and lines_of(metrics) < count:
        time.sleep(0.002)


def lines_of(metrics: Path) -> int:
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def wait_until_it_dies(job: Job) -> None:
    while job.running:
        time.sleep(0.01)


def assert_same(one: Path, other: Path) -> None:
    """Every tensor, to the bit: weights, moments, counts, random numbers."""
    shapes = checkpoint.shapes(one)
    assert shapes == checkpoint.shapes(other) and len(shapes) > 10
    for name in shapes:
        a, b = checkpoint.read_tensor(one, name), checkpoint.read_tensor(other, name)
        assert a is not None and b is not None and torch.equal(a, b), name
