"""Writes one checkpoint, all ranks together: whole, or not at all.

Every rank writes its parts through DCP into an unfinished folder and has them on disk; the lead adds a note, then the
manifest of all files' digests, and renames the folder. Where any rank fails, every rank hears of it and nothing is
left.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from slimpipe.train.checkpoint import folders
from slimpipe.train.checkpoint.digests import Digest, DigestingWriter, write_json, write_manifest
from slimpipe.train.checkpoint.errors import CheckpointError
from slimpipe.train.checkpoint.parts import PartsToSave, State
from slimpipe.train.checkpoint.peers import Peers

NOTE: Final = "note.json"

Note = Mapping[str, Any]
"""What a checkpoint says besides tensors: plain JSON."""


def write(checkpoint: Path, state: State, note: Note, peers: Peers, count: Callable[[int], None]) -> None:
    """Writes this rank's parts of `state`; collective over `peers`. The lead's note counts.

    A part given by several ranks must hold the same values on each. Raises CheckpointError on every rank where a disk
    failed on any; `count` is told of bytes as they are written.
    """
    _all_well(checkpoint, peers, lambda: folders.start(checkpoint), lead_only=True)
    try:
        digests = peers.from_all(_write_parts(checkpoint, state, peers, count))
        everything = {name: digest for part in digests for name, digest in part.items()}
        _all_well(checkpoint, peers, lambda: _finish(checkpoint, note, everything), lead_only=True)
    except CheckpointError:
        if peers.leads:
            shutil.rmtree(folders.unfinished(checkpoint), ignore_errors=True)
        raise


def _write_parts(checkpoint: Path, state: State, peers: Peers, count: Callable[[int], None]) -> Mapping[str, Digest]:
    writer = DigestingWriter(folders.unfinished(checkpoint), count)
    alone = peers.group is None
    try:
        with alone_on_purpose():
            dcp.save(
                dict(state), storage_writer=writer, planner=PartsToSave(), process_group=peers.group, no_dist=alone
            )
    except CheckpointException as error:  # on every rank; not an Exception
        failures = {rank: failure for rank, (failure, _) in error.failures.items()}
        rank, first = min(failures.items())
        if not all(isinstance(failure, OSError) for failure in failures.values()):
            raise RuntimeError(f"checkpoint {checkpoint}: {error}") from first
        raise _not_written(checkpoint, rank, first) from first
    return writer.digests


def _finish(checkpoint: Path, note: Note, digests: Mapping[str, Digest]) -> None:
    folder = folders.unfinished(checkpoint)
    for name in digests:
        if not (folder / name).exists():
            raise FileNotFoundError(f"{name}, written by another node, is not there: put train.output on a shared disk")
    noted = write_json(folder / NOTE, note)
    write_manifest(folder, {**digests, NOTE: noted})
    folders.finish(checkpoint)


def _all_well(checkpoint: Path, peers: Peers, do: Callable[[], object], lead_only: bool) -> None:
    """Carries out `do`, on the lead alone if so wanted. Raises CheckpointError on every rank where it failed on any."""
    failure: OSError | None = None
    if peers.leads or not lead_only:
        try:
            do()
        except OSError as error:
            failure = error
    told = peers.from_lead(failure) if lead_only else next(filter(None, peers.from_all(failure)), None)
    if told is not None:
        raise _not_written(checkpoint, 0, told) from told


def _not_written(checkpoint: Path, rank: int, error: BaseException) -> CheckpointError:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return CheckpointError(
        f"{checkpoint}: not written (rank {rank}: {reason}); make room or repair the disk, or lower train.keep_last"
    )


@contextmanager
def alone_on_purpose() -> Iterator[None]:
    """One process without a process group: DCP warns of it, and it is what is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed.checkpoint")
        yield


def read_note(checkpoint: Path) -> Note:
    """Raises OSError or ValueError where there is none or it makes no sense."""
    note = json.loads((checkpoint / NOTE).read_bytes())
    if not isinstance(note, dict):
        raise ValueError(f"{NOTE} is damaged")
    return note
