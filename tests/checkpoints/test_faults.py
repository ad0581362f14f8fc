"""Disks that are full, files that are damaged, settings that have changed: one line each, and nothing is lost."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from slimpipe.config import Config, ConfigError, load_config
from slimpipe.runtime.watchdog import Progress
from slimpipe.train import checkpoint
from slimpipe.train.checkpoint import CheckpointError, Keeping, Part, Peers, Saver, digests, folders
from slimpipe.train.main import _claim
from slimpipe.train.metrics import MetricsFile
from slimpipe.train.resume import make_note, refuse_changes
from slimpipe.train.rows import keep_rows, last_step
from tests.checkpoints.conftest import checkpoints, losses, names
from tests.support.jobs import Jobs
from tests.support.pool import Pool

# ---- a full disk ----


@contextmanager
def full_at(call: str, count: int) -> Iterator[None]:
    """The `count`-th such call finds the disk full: `write`, a piece of a file; or one of the system's."""
    owner, name = (digests._Stream, "write") if call == "write" else (os, call)
    before, left = getattr(owner, name), count

    def full(*arguments: Any, **keywords: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if call == "write":
                arguments[0].error = error
            raise error
        return before(*arguments, **keywords)

    setattr(owner, name, full)
    try:
        yield
    finally:
        setattr(owner, name, before)


def state(value: float, rank: int) -> dict[str, Part]:
    return {"model.shared": Part.whole(torch.full((5,), value)), f"model.{rank}": Part.whole(torch.full((9,), value))}


def save_on_a_full_disk(rank: int, world: int, run: Path, where: int, call: str, count: int) -> list[str]:
    """Three checkpoints; the second meets a full disk on rank `where`. What is told of each."""
    saver = Saver(run, Peers.of_job("test", 60), Keeping(2), 60, Progress())
    told = []
    for step in (1, 2, 3):
        with full_at(call, count if step == 2 and rank == where else 0):
            saver.save(state(step, rank), {"step": step}, step)
            told += saver.told(patiently=True)
    return told


POINTS = [("write", 1), ("write", 3), ("fsync", 1)]
POINTS_OF_THE_LEAD = [
    ("mkdir", 1),
    ("fsync", 2),
    ("fsync", 3),
    ("fsync", 4),
    ("fsync", 5),
    ("rename", 1),
    ("rename", 2),
]


@pytest.mark.parametrize(
    ("where", "call", "count"),
    [(rank, *point) for rank in (0, 1) for point in POINTS] + [(0, *point) for point in POINTS_OF_THE_LEAD],
)
def test_a_full_disk_costs_one_checkpoint_and_no_more(
    where: int, call: str, count: int, pool: Callable[[int], Pool], tmp_path: Path
) -> None:
    """Every rank is told, in one line; the one before stays, and the next finds room again."""
    for told in pool(2).run(save_on_a_full_disk, tmp_path, where, call, count):
        first, second, third = told
        assert (first, third) == tuple(f"checkpoint: {folders.place(tmp_path, step)}" for step in (1, 3))
        assert second == (
            f"checkpoint {folders.place(tmp_path, 2)}: not written (rank {where}: No space left on device); make room "
            "or repair the disk, or lower train.keep_last; training goes on without it"
        )
    assert checkpoints(tmp_path) == names([1, 3])
    for step in (1, 3):
        assert checkpoint.read_weights(folders.place(tmp_path, step))["0"].eq(step).all()


def small_files(rank: int) -> None:
    """No file of rank 1 may grow beyond 40,000 bytes: its part of a checkpoint would."""
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))


def test_a_run_outlives_a_disk_that_takes_no_more(jobs: Jobs, tiny: list[str], tmp_path: Path) -> None:
    settings = [*tiny, "optim.schedule=constant", "train.checkpoint_every=2"]
    run, alone = tmp_path / "run", tmp_path / "alone"
    assert jobs.run(*settings, "train.steps=3", f"train.output={run}", ranks=2).wait() == [0, 0]
    job = jobs.run(*settings, "train.steps=7", f"train.output={run}", ranks=2, first=small_files)
    assert job.wait() == [2, 2] and "Traceback" not in job.said, job.said
    why = "not written (rank 1: File too large); make room or repair the disk, or lower train.keep_last"
    said = job.said.splitlines()
    assert [line for line in said if "not written" in line] == [
        f"checkpoint {folders.place(run, 4)}: {why}; training goes on without it",
        f"checkpoint {folders.place(run, 6)}: {why}; training goes on without it",
        f"{folders.place(run, 7)}: {why}",
    ]
    assert checkpoints(run) == names([2, 3]) and len(losses(run)) == 7

    job = jobs.run(*settings, "train.steps=7", f"train.output={run}", ranks=2)
    assert f"resumed from {folders.place(run, 3)}: step 4 of 7 is next" in job.said
    assert "metrics.jsonl: 4 rows of steps that will be done again moved to metrics.dropped.jsonl" in job.said
    jobs.run(*settings, "train.steps=7", f"train.output={alone}", ranks=2)
    assert losses(run) == losses(alone)
    dropped = [json.loads(line)["step"] for line in (run / "metrics.dropped.jsonl").read_text().splitlines()]
    assert dropped == [4, 5, 6, 7]


def test_no_thread_is_left_behind_a_finished_run(tmp_path: Path) -> None:
    """It lets go of what it has written after it has said so. In torch at the interpreter's end, it would end the
    process with SIGABRT (docs/log.md, 2026-11-30)."""

    class Lingering(dict[str, Part]):
        def __del__(self) -> None:
            time.sleep(0.5)

    saver = Saver(tmp_path, Peers(), Keeping(2), 60, Progress())
    saver.save(Lingering({"model.w": Part.whole(torch.ones(3))}), {}, 1)
    assert saver.finish() == [f"checkpoint: {folders.place(tmp_path, 1)}"]
    assert [thread.name for thread in threading.enumerate() if thread.name == "checkpoint"] == []


def test_a_checkpoint_is_of_its_own_step_whatever_happens_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    write = digests._Stream.write

    def late(stream: Any, data: Any) -> int:
        assert may_write.wait(60)
        return write(stream, data)

    monkeypatch.setattr(digests._Stream, "write", late)
    weight = torch.ones(4)
    saver = Saver(tmp_path, Peers(), Keeping(2), 60, Progress())
    saver.go_beside_steps({"model.w": Part.whole(weight)}, weight.device)
    assert saver.save({"model.w": Part.whole(weight)}, {}, 1) == []
    saver.hold()
    weight += 1  # the next step
    assert saver.told() == []
    may_write.set()
    assert saver.finish() == [f"checkpoint: {folders.place(tmp_path, 1)}"]
    assert checkpoint.read_weights(folders.place(tmp_path, 1))["w"].eq(1).all()


# ---- a damaged checkpoint ----


def shard(folder: Path) -> Path:
    return folder / "__1_0.distcp"


def flip(folder: Path) -> None:
    data = bytearray(shard(folder).read_bytes())
    data[len(data) // 2] ^= 16
    shard(folder).write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda folder: os.truncate(shard(folder), 1000), "__1_0.distcp has 1000 bytes, not "),
    "missing": (lambda folder: shard(folder).unlink(), "__1_0.distcp is missing"),
    "flipped": (flip, "__1_0.distcp is damaged (its sha256 is another)"),
}


def test_the_checkpoint_before_a_damaged_one_is_taken(jobs: Jobs, tiny: list[str], tmp_path: Path) -> None:
    settings = [*tiny, "train.steps=6", "train.checkpoint_every=2", "train.keep_last=3"]
    alone = tmp_path / "alone"
    assert jobs.run(*settings, f"train.output={alone}", ranks=2).wait() == [0, 0]
    for what, (damage, fault) in DAMAGE.items():
        run = shutil.copytree(alone, tmp_path / what)
        damage(folders.place(run, 6))
        job = jobs.run(*settings, f"train.output={run}", ranks=2)
        assert job.wait() == [0, 0], job.said
        assert f"checkpoint {folders.place(run, 6)}: passed over, {fault}" in job.said
        assert f"resumed from {folders.place(run, 4)}: step 5 of 6 is next" in job.said
        assert f"checkpoint {folders.place(run, 6)}: renamed to damaged_step_6" in job.said
        assert losses(run) == losses(alone)
        assert checkpoints(run) == sorted([*names([2, 4, 6]), "damaged_step_6"])
        checkpoint.verify(folders.place(run, 6))

    run = shutil.copytree(alone, tmp_path / "all")
    for step in (2, 4, 6):
        flip(folders.place(run, step))
    before = losses(run)
    job = jobs.run(*settings, f"train.output={run}", ranks=2)
    assert job.wait() == [2, 2] and len(job.said.splitlines()) == 1
    assert f"{run}/checkpoints: no checkpoint there is whole (step_6: __1_0.distcp is damaged" in job.said
    assert "; bring one back, or remove that folder to start from the beginning" in job.said
    assert losses(run) == before and checkpoints(run) == names([2, 4, 6])

    # Other settings for the same run, on one that is whole.
    job = jobs.run(*settings, f"train.output={alone}", "model.hidden_size=24", ranks=2)
    assert job.wait() == [2, 2]
    assert set(job.said.splitlines()) == {
        "model.hidden_size = 24: the run in train.output was trained with 16 (step_6); set it back, or choose another "
        "train.output"
    }
    job = jobs.run(*settings, f"train.output={alone}", "train.steps=8", "train.seed=1", ranks=2)
    assert job.wait() == [2, 2]
    assert job.said.splitlines() == [
        "train.seed = 1: the checkpoint's place in the data was reached with 0; set it back, or start anew from the "
        "checkpoint's weights alone (train.init_from)"
    ]
    assert losses(alone) == before and checkpoints(alone) == names([2, 4, 6])

    job = jobs.run(*settings, f"train.output={alone}", "train.steps=7", "parallel.pp=1", "optim.lr=5e-3", ranks=1)
    assert job.wait() == [0]
    assert (
        "settings changed since the checkpoint: parallel.pp 2 -> 1, optim.lr 0.01 -> 0.005, train.steps 6 -> 7"
        in job.said.splitlines()
    )
    assert len(losses(alone)) == 7


# ---- a folder that cannot be written ----


def test_a_folder_of_checkpoints_that_cannot_be_made_is_told_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(ValueError) as refusal:
        _claim(tmp_path)
    assert str(refusal.value) == (
        f"train.output = {tmp_path}: cannot be written (checkpoints: File exists); choose another folder"
    )


def test_a_folder_that_takes_no_file_is_told_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    with pytest.raises(ValueError, match=r"cannot be written \(Read-only file system\); choose another folder"):
        _claim(tmp_path)


def blind(rank: int, world: int, folders_by_rank: list[Path]) -> list[int]:
    return folders.blind(folders_by_rank[rank], Peers.of_job("test", 60))


def test_ranks_that_see_another_disk_are_named(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    for name in ("shared", "own"):
        (tmp_path / name).mkdir()
    shared, own = tmp_path / "shared", tmp_path / "own"
    assert pool(3).run(blind, [shared, shared, own]) == [[2]] * 3
    assert pool(3).run(blind, [shared] * 3) == [[]] * 3
    assert not list(shared.iterdir())


# ---- settings ----


@pytest.fixture
def settings(tiny: list[str], tmp_path: Path) -> Callable[..., Config]:
    """`settings(override, ...)`: the tiny run's, in `tmp_path`."""
    config, *overrides = tiny
    return lambda *more: load_config(config, [*overrides, "train.steps=9", f"train.output={tmp_path}", *more])


def leave_a_checkpoint(config: Config, step: int, **changes: Any) -> Path:
    folder = folders.place(Path(config.train.output), step)
    note = {**make_note(config, step, {}, 2), **changes}
    checkpoint.write(folder, {"model.x": Part.whole(torch.zeros(1))}, note, Peers())
    return folder


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("model.layers=8", "model.layers = 8: the run in train.output was trained with 4 (step_3)"),
        ("model.kv_heads=1", "model.kv_heads = 1: the run in train.output was trained with 2 (step_3)"),
        ("model.tie_embeddings=false", "model.tie_embeddings = false: the run in train.output was trained with true"),
        ("model.rope_theta=5e5", "model.rope_theta = 500000.0: the run in train.output was trained with 10000.0"),
        ("model.rope_scaling={type: linear, factor: 2.0}", "model.rope_scaling = {"),
        ("model.name=tests.support.failing_models:WithDropout", "model.name = tests.support.failing_models:"),
    ],
)
def test_another_model_is_refused_by_its_key(override: str, line: str, settings: Callable[..., Config]) -> None:
    leave_a_checkpoint(settings(), 3)
    with pytest.raises(ConfigError) as refusal:
        refuse_changes(settings(override))
    (said,) = refusal.value.lines
    assert said.startswith(line) and said.endswith("; set it back, or choose another train.output")


@pytest.mark.parametrize(
    "override",
    [
        "parallel.pp=4",
        "pipeline.virtual_stages=2",
        "pipeline.slices=4",
        "optim.lr=1e-4",
        "train.steps=100",
        "train.dtype=bfloat16",
        "model.init_std=0.1",
        "train.global_batch=4",
        "log.every=7",
    ],
)
def test_what_is_not_the_model_may_change(override: str, settings: Callable[..., Config]) -> None:
    leave_a_checkpoint(settings(), 3)
    refuse_changes(settings(override))


def test_the_newest_checkpoint_that_can_be_asked_is_asked(settings: Callable[..., Config]) -> None:
    leave_a_checkpoint(settings("model.layers=6"), 3)
    (leave_a_checkpoint(settings("model.layers=5"), 4) / "note.json").write_text("{")
    flipped = leave_a_checkpoint(settings("model.layers=5"), 5) / "note.json"  # JSON still, of a format nobody knows
    flipped.write_text(flipped.read_text().replace('"format": 1', '"format": 3'))
    with pytest.raises(ConfigError, match=r"^model.layers = 4: the run in train.output was trained with 6 \(step_3\)"):
        refuse_changes(settings())


def test_a_checkpoint_of_another_format_is_refused(settings: Callable[..., Config]) -> None:
    folder = leave_a_checkpoint(settings(), 3, format=2)
    with pytest.raises(CheckpointError, match=f"^{folder}: its format is 2, not 1; use its own slimpipe$"):
        refuse_changes(settings())


# ---- what stays ----


@pytest.mark.parametrize(
    ("last", "every", "stay"),
    [
        (1, None, [70]),
        (2, None, [60, 70]),
        (9, None, [10, 20, 30, 40, 50, 60, 70]),
        (1, 30, [30, 60, 70]),
        (2, 20, [20, 40, 60, 70]),
    ],
)
def test_the_last_ones_stay_and_some_for_good(last: int, every: int | None, stay: list[int], tmp_path: Path) -> None:
    steps = range(10, 80, 10)
    for step in steps:
        folders.place(tmp_path, step).mkdir(parents=True)
    folders.place(tmp_path, 5000).mkdir()  # of another attempt, later than what has just been done
    folders.thin_out(tmp_path, 70, last, every)
    assert checkpoints(tmp_path) == names([*stay, 5000])
    assert sorted(set(steps) - set(folders.superfluous(steps, last, every))) == stay


def test_what_a_dead_process_has_left_half_done_is_removed(tmp_path: Path) -> None:
    for name in (".step_8.unfinished", ".step_2.removed", "step_6", "damaged_step_7"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "file").write_text("")
    folders.sweep(tmp_path)
    assert checkpoints(tmp_path) == ["damaged_step_7", "step_6"]


# ---- rows ----


def test_a_row_that_the_disk_does_not_take_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    metrics = MetricsFile(tmp_path)
    with pytest.raises(CheckpointError) as refusal:
        metrics.write({"step": 1})
    assert str(refusal.value) == (
        f"{tmp_path}/metrics.jsonl: cannot be written (No space left on device); make room, then the same command goes "
        "on from the last checkpoint"
    )
    metrics.close()


def test_rows_stay_where_they_are_on_a_full_disk(tmp_path: Path) -> None:
    text = '{"step": 1}\n{"step": 2}\n'
    (tmp_path / "metrics.jsonl").write_text(text)
    (tmp_path / "metrics.dropped.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        keep_rows(tmp_path, 1)
    assert (tmp_path / "metrics.jsonl").read_text() == text


def test_the_last_step_on_record(tmp_path: Path) -> None:
    assert last_step(tmp_path) == 0
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n{"step": 4, "loss": 1.0}\n')
    assert last_step(tmp_path) == 4


def test_rows_beyond_the_checkpoint_are_taken_out_and_kept_aside(tmp_path: Path) -> None:
    rows = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"note": "no step"}, {"step": 3}, {"step": 4}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(text + 'garbage\n{"step": 5, "lo')
    assert keep_rows(tmp_path, 2) == 4
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == rows[:3]
    dropped = (tmp_path / "metrics.dropped.jsonl").read_text()
    assert dropped == '{"step": 3}\n{"step": 4}\ngarbage\n{"step": 5, "lo\n'
    assert keep_rows(tmp_path, 2) == 0
    assert (tmp_path / "metrics.dropped.jsonl").read_text() == dropped
    assert keep_rows(tmp_path / "nowhere", 2) == 0
