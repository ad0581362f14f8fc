"""A rank that raises, dies or hangs in mid-step takes the job down at once, and the output says which and where.

Under torchrun where its summary is looked at, else in processes that are forked, which start in a tenth of the time.
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.end_to_end.launch import QUICKSTART, slimpipe
from tests.support.failing_models import MISBEHAVIOUR
from tests.support.jobs import Jobs

# Layer 6 of 8 is on rank 1 of 2. With two microbatches, its third visit to slice 2 is F0.2@0 of the second step.
PLACE = "6 2 3"
ACTION = "F0.2@0"
TOKEN = r"[A-Z]+\d\.\d@0\S*"
"""Of any action in slices of one chunk: where the other rank stands by then is the plan's business."""
STALLED = 3


@dataclass(frozen=True)
class Failed:
    """A job that has failed: its folder, its exit codes (the launcher's, or every rank's), and what it has said."""

    output: Path
    codes: list[int]
    said: str


def arguments(small: list[str], output: Path, *overrides: str) -> list[str]:
    model = "model.name=tests.support.failing_models:Misbehaving"
    return [QUICKSTART, *small, model, "train.steps=4", *overrides, f"train.output={output}"]


def train(what: str, small: list[str], output: Path) -> Failed:
    # Collective operations would wait ten minutes for a rank: a job that has to be ended by the limit is a failure
    # here, and in `Jobs`.
    environment = {MISBEHAVIOUR: f"{what} {PLACE}"}
    finished = slimpipe("train", *arguments(small, output), ranks=2, limit=120, **environment)
    return Failed(output, [finished.code], finished.err)


def train_forked(jobs: Jobs, what: str, small: list[str], output: Path, *overrides: str) -> Failed:
    job = jobs.start(*arguments(small, output, *overrides), ranks=2, first=partial(misbehaving, f"{what} {PLACE}"))
    return Failed(output, job.wait(), job.said)


def misbehaving(how: str, rank: int) -> None:
    os.environ[MISBEHAVIOUR] = how


def assert_failed_in_the_second_step(failed: Failed) -> None:
    """The first step is recorded; nothing passes for a finished run."""
    assert not {0, 2} & set(failed.codes), failed.said
    assert len((failed.output / "metrics.jsonl").read_text().splitlines()) == 1
    assert not list((failed.output / "checkpoints").iterdir())


def test_a_rank_that_raises_is_named_with_its_action_and_traceback(small: list[str], tmp_path: Path) -> None:
    failed = train("raise", small, tmp_path / "run")
    assert_failed_in_the_second_step(failed)
    error = failed.said
    assert re.search(rf"^\[[\d:]{{8}}\] rank 1 failed at: {ACTION}\nTraceback", error, re.MULTILINE), error
    own = error[error.index("rank 1 failed at") :]
    assert re.search(r'File ".*failing_models\.py", line \d+, in misbehave', own)
    assert "ArithmeticError: this block has had enough" in own
    # torchrun's summary names the rank that raised as the cause, not the one that lost contact.
    cause = error[error.index("Root Cause") :]
    assert re.search(r"rank\s*: 1 \(local_rank: 1\)", cause), error


def test_a_step_that_is_not_finite_stops_the_job_with_one_line(jobs: Jobs, small: list[str], tmp_path: Path) -> None:
    """NaN from a block of rank 1: rank 0 tells it, for all; the batch run again is finite, for it was not to blame."""
    failed = train_forked(jobs, "poison", small, tmp_path / "run")
    assert_failed_in_the_second_step(failed)
    said = failed.said
    (line,) = [line for line in said.splitlines() if line.startswith("step 2")]
    assert line.startswith("step 2: loss nan, gradient norm nan; first bad parameter as the backward goes: "), line
    place = r"\S+/text\.py, tokens \d+ to \d+, epoch 0"
    assert re.search(rf", ranks 0, 1\); run again, its batch has finite losses \({place}; {place}\)\. Weights", line), (
        line
    )
    # It is not buried under where the ranks were.
    assert "slimpipe/train" not in said and "NonFinite" not in said and "Traceback" not in said, said


LOST = rf"rank 0 failed at: {TOKEN}: lost contact with rank 1, which has failed, was killed or does not answer \(.*\)"


def test_a_killed_rank_takes_the_job_down(small: list[str], tmp_path: Path) -> None:
    """torchrun ends rank 0 as soon as it has seen rank 1 gone: on a busy machine before rank 0 has said so itself."""
    failed = train("die", small, tmp_path / "run")
    assert_failed_in_the_second_step(failed)
    error = failed.said
    cause = error[error.index("Root Cause") :]
    assert re.search(r"rank\s*: 1 \(local_rank: 1\)", cause) and "Signal 9 (SIGKILL)" in cause, error
    # What the other rank was doing does not bury it.
    assert "slimpipe/train/main.py" not in error, error


@pytest.mark.parametrize("exchange", ["off", "balanced"])
def test_a_rank_that_is_killed_is_missed_by_the_other(
    exchange: str, jobs: Jobs, small: list[str], tmp_path: Path
) -> None:
    """With exchange it dies between two layers, where the other waits for what it lent to it."""
    failed = train_forked(jobs, "die", small, tmp_path / "run", f"pipeline.exchange={exchange}")
    assert_failed_in_the_second_step(failed)
    assert re.search(rf"^\[[\d:]{{8}}\] {LOST}$", failed.said, re.MULTILINE), failed.said
    assert failed.codes[1] == -signal.SIGKILL and "slimpipe/train/main.py" not in failed.said, failed.said


def test_the_watchdog_names_every_ranks_action(jobs: Jobs, small: list[str], tmp_path: Path) -> None:
    failed = train_forked(jobs, "sleep", small, tmp_path / "run", f"train.watchdog_seconds={STALLED}")
    assert_failed_in_the_second_step(failed)
    error = failed.said
    table = (
        rf"^watchdog: no progress for {STALLED} s \(train\.watchdog_seconds\); every rank's current action:\n"
        rf"  rank 0: {TOKEN}, unchanged for [\d.]+ s\n"
        rf"  rank 1: {re.escape(ACTION)}, unchanged for [\d.]+ s$"
    )
    assert re.search(table, error, re.MULTILINE), error
    assert re.search(r'rank 1 stands:\n(.*\n)*?  File ".*failing_models\.py", line \d+ in misbehave', error), error
