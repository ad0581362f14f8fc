"""Signals: every rank saves at one step and exits with 0; a second signal ends it at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing import util
from pathlib import Path

import pytest

from slimpipe.train.checkpoint import Peers
from slimpipe.train.stop import Stop
from tests.checkpoints.conftest import checkpoints, losses
from tests.support.jobs import Job, Jobs
from tests.support.pool import Pool


@pytest.fixture
def left() -> list[int]:
    return []


def test_one_request_may_come_as_several_signals(left: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with Stop(left.append) as stop:
        assert not stop.requested and stop.agreed(Peers()) is None
        os.kill(os.getpid(), signal.SIGTERM)
        now += 0.5  # from the job's manager, then from the launcher
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested and stop.agreed(Peers()) == "SIGTERM" and left == []


def test_a_second_request_ends_the_process(left: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with Stop(left.append):
        os.kill(os.getpid(), signal.SIGINT)
        now += 1.5
        os.kill(os.getpid(), signal.SIGTERM)
    assert left == [128 + signal.SIGTERM]


def test_afterwards_signals_are_what_they_were() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with Stop() as stop:
        assert signal.getsignal(signal.SIGTERM) not in before
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    stop.release()


def agreed(rank: int, world: int) -> list[str | None]:
    peers, said = Peers.of_job("test", 60), []
    with Stop() as stop:
        for step in range(3):
            if rank == 1 and step == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            said.append(stop.agreed(peers))
    return said


def test_ranks_agree_on_the_step(pool: Callable[[int], Pool]) -> None:
    assert pool(3).run(agreed) == [[None, "SIGTERM", "SIGTERM"]] * 3


def wait_for_rows(job: Job, run: Path, count: int) -> None:
    metrics = run / "metrics.jsonl"
    while job.running and not (metrics.exists() and metrics.read_bytes().count(b"\n") >= count):
        time.sleep(0.005)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_to_one_rank_saves_the_run_which_goes_on_to_the_same_end(
    ranks: int, jobs: Jobs, tiny: list[str], tmp_path: Path
) -> None:
    settings = [*tiny, f"parallel.pp={ranks}", "optim.schedule=constant"]
    stopped, alone = tmp_path / "stopped", tmp_path / "alone"
    job = jobs.start(*settings, "train.steps=100000", f"train.output={stopped}", ranks=ranks)
    wait_for_rows(job, stopped, 3)
    os.kill(job.processes[-1].pid or 0, signal.SIGTERM)
    assert job.wait() == [0] * ranks, job.said
    step = len(losses(stopped))
    line = f"stopped by SIGTERM after step {step} of 100000: the same command goes on from here"
    assert line in job.said.splitlines()
    assert checkpoints(stopped) == [f"step_{step}"]

    steps = f"train.steps={step + 4}"
    job = jobs.run(*settings, steps, f"train.output={stopped}", ranks=ranks)
    assert f"resumed from {stopped}/checkpoints/step_{step}: step {step + 1} of {step + 4} is next" in job.said
    jobs.run(*settings, steps, f"train.output={alone}", ranks=ranks)
    assert losses(stopped) == losses(alone) and len(losses(alone)) == step + 4


def slow_disk(rank: int) -> None:
    sync = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(600)
        sync(descriptor)

    os.fsync = slow  # type: ignore[assignment]


def test_a_second_signal_does_not_wait_for_the_disk(jobs: Jobs, tiny: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = jobs.start(*tiny, "train.steps=100000", f"train.output={run}", ranks=2, first=slow_disk)
    wait_for_rows(job, run, 2)
    for process in job.processes:
        os.kill(process.pid or 0, signal.SIGINT)
    while job.running and not (run / "checkpoints").exists():
        time.sleep(0.01)
    time.sleep(1.2)
    for process in job.processes:
        os.kill(process.pid or 0, signal.SIGINT)
    assert job.wait() == [130, 130], job.said
    assert all(name.startswith(".") for name in checkpoints(run))


def test_a_disk_that_hangs_ends_the_run_with_a_line(jobs: Jobs, tiny: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = [*tiny, "train.steps=9", "train.checkpoint_every=2", "train.checkpoint_seconds=2"]
    job = jobs.run(*settings, f"train.output={run}", ranks=2, first=slow_disk)
    assert job.wait() == [2, 2], job.said
    line = f"{run}/checkpoints/step_2: still not written after 2 s (train.checkpoint_seconds)"
    assert line in job.said.splitlines() and "Traceback" not in job.said
    # One checkpoint at a time: the next steps were done meanwhile, up to the next checkpoint.
    assert len(losses(run)) == 4


def slow_disk_and_a_witness(rank: int) -> None:
    slow_disk(rank)
    util.Finalize(None, os.write, (1, b"the interpreter ends in peace\n"), exitpriority=0)


def test_alone_too_a_process_that_still_writes_ends_at_once(jobs: Jobs, tiny: list[str], tmp_path: Path) -> None:
    """A thread that comes out of torch while the interpreter ends would abort it."""
    settings = [*tiny, "parallel.pp=1", "train.steps=1", f"train.output={tmp_path / 'run'}"]
    job = jobs.run(*settings, "train.checkpoint_seconds=0.5", first=slow_disk_and_a_witness)
    assert job.wait() == [2], job.said
    assert "still not written after 0.5 s (train.checkpoint_seconds)" in job.said and "Traceback" not in job.said
    assert "in peace" not in job.said


def test_random_numbers_go_on_too(jobs: Jobs, tiny: list[str], tmp_path: Path) -> None:
    settings = [*tiny, "model.name=tests.support.failing_models:WithDropout", "optim.schedule=constant"]
    halves, alone = tmp_path / "halves", tmp_path / "alone"
    for steps in (3, 6):
        assert jobs.run(*settings, f"train.steps={steps}", f"train.output={halves}", ranks=2).wait() == [0, 0]
    jobs.run(*settings, "train.steps=6", f"train.output={alone}", ranks=2)
    assert losses(halves) == losses(alone)
    plain = tmp_path / "plain"
    jobs.run(*tiny, "optim.schedule=constant", "train.steps=1", f"train.output={plain}", ranks=2)
    assert losses(plain)[0] != losses(alone)[0]  # something was drawn
