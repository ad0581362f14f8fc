"""Where checkpoints lie: `checkpoints/step_<steps done>` in the run's folder. Other names there are none.

A checkpoint is written under a name that starts with a dot and renamed when it is whole; one that goes is renamed
first. So whatever moment the process dies at, a folder of a right name is a whole checkpoint.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from slimpipe.train.checkpoint.peers import Peers

_PREFIX: Final = "step_"
_UNFINISHED: Final = ".unfinished"
_REMOVED: Final = ".removed"
_DAMAGED: Final = "damaged_"


def home(run: Path) -> Path:
    return run / "checkpoints"


def place(run: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps belongs."""
    return home(run) / f"{_PREFIX}{step}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(_PREFIX))


def found(run: Path) -> list[Path]:
    """The run's checkpoints, newest first."""
    named = [path for path in home(run).glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdecimal()]
    return sorted((path for path in named if path.is_dir()), key=step_of, reverse=True)


def unfinished(checkpoint: Path) -> Path:
    """Where it is written."""
    return checkpoint.with_name(f".{checkpoint.name}{_UNFINISHED}")


def start(checkpoint: Path) -> Path:
    """An empty folder to write it in."""
    folder = unfinished(checkpoint)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def finish(checkpoint: Path) -> None:
    """Puts the written one in its place, on disk when it returns. One that was there goes."""
    folder = unfinished(checkpoint)
    sync(folder)
    away = _away(checkpoint)
    if checkpoint.exists():
        shutil.rmtree(away, ignore_errors=True)
        checkpoint.rename(away)
    folder.rename(checkpoint)
    sync(checkpoint.parent)
    shutil.rmtree(away, ignore_errors=True)


def sync(path: Path) -> None:
    """Has a file, or the names in a folder, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def superfluous(steps: Iterable[int], keep_last: int, keep_every: int | None) -> list[int]:
    """Which go: all but the last `keep_last` and those at multiples of `keep_every`."""
    ordered = sorted(steps, reverse=True)
    return [step for step in ordered[keep_last:] if keep_every is None or step % keep_every]


def thin_out(run: Path, done: int, keep_last: int, keep_every: int | None) -> None:
    """Removes what is superfluous among the checkpoints of up to `done` steps; later ones are not this run's."""
    steps = [step for step in map(step_of, found(run)) if step <= done]
    for step in superfluous(steps, keep_last, keep_every):
        remove(place(run, step))


def remove(checkpoint: Path) -> None:
    away = _away(checkpoint)
    shutil.rmtree(away, ignore_errors=True)
    checkpoint.rename(away)
    shutil.rmtree(away, ignore_errors=True)


def set_aside(checkpoint: Path) -> Path:
    """Renames a damaged one, so that it neither counts as one that is kept nor is in the way."""
    for number in range(1000):
        away = checkpoint.with_name(f"{_DAMAGED}{checkpoint.name}" + (f"_{number}" if number else ""))
        if not away.exists():
            checkpoint.rename(away)
            return away
    raise FileExistsError(f"{checkpoint.parent}: a thousand damaged checkpoints")


def sweep(run: Path) -> None:
    """Removes what a process that died has left half written or half removed; nobody else may be writing."""
    for pattern in (f".{_PREFIX}*{_UNFINISHED}", f".{_PREFIX}*{_REMOVED}"):
        for path in home(run).glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _away(checkpoint: Path) -> Path:
    return checkpoint.with_name(f".{checkpoint.name}{_REMOVED}")


def blind(folder: Path, peers: Peers) -> list[int]:
    """Ranks that do not see what the lead writes to `folder`: their node has another disk there. Collective."""
    mark = peers.from_lead(f".seen_{uuid.uuid4().hex}")
    if peers.leads:
        (folder / mark).touch()
    peers.from_lead(None)  # it is there
    seen = peers.from_all((folder / mark).exists())
    if peers.leads:
        (folder / mark).unlink()
    return [rank for rank, sees in enumerate(seen) if not sees]
