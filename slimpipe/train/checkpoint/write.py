"""Writes one checkpoint, all ranks together: whole, or not at all.

Every rank writes its parts through DCP into an unfinished folder and has them on disk; the lead adds a note, then the
manifest of all files' digests, and renames the folder. Where any rank fails, every rank hears of it and nothing is
left.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from slimpipe.train.checkpoint import folders
from slimpipe.train.checkpoint.digests import (
    Digest,
    DigestingWriter,
    digest_of,
    read_manifest,
    write_json,
    write_manifest,
)
from slimpipe.train.checkpoint.errors import CheckpointError
from slimpipe.train.checkpoint.parts import PartsToSave, State
from slimpipe.train.checkpoint.peers import Peers

NOTE: Final = "note.json"

Note = Mapping[str, Any]
"""What a checkpoint says besides tensors: plain JSON."""


def write(
    checkpoint: Path,
    state: State,
    note: Note,
    peers: Peers,
    records: Sequence[Path] = (),
    a_file_a_tensor: bool = False,
) -> None:
    """Writes this rank's parts of `state`; collective over `peers`. The lead's note counts. `records`: files of the
    lead's that must be on disk before the checkpoint is there. `a_file_a_tensor`: in place of one a rank; DCP keeps all
    that goes into a file in memory until that is done.

    A part given by several ranks must hold the same values on each. Raises CheckpointError on every rank where a disk
    failed on any.
    """
    _by_lead(checkpoint, peers, lambda: folders.start(checkpoint))
    try:
        digests = peers.from_all(_write_parts(checkpoint, state, peers, a_file_a_tensor))
        everything = {name: digest for part in digests for name, digest in part.items()}
        _by_lead(checkpoint, peers, lambda: _finish(checkpoint, note, everything, records))
    except CheckpointError:
        if peers.leads:
            shutil.rmtree(folders.unfinished(checkpoint), ignore_errors=True)
        raise


def _write_parts(checkpoint: Path, state: State, peers: Peers, a_file_a_tensor: bool) -> Mapping[str, Digest]:
    writer = DigestingWriter(folders.unfinished(checkpoint), a_file_a_tensor)
    alone = peers.group is None
    if alone:
        quiet_alone()
    try:
        dcp.save(dict(state), storage_writer=writer, planner=PartsToSave(), process_group=peers.group, no_dist=alone)
    except CheckpointException as error:  # on every rank; not an Exception
        failures = {rank: failure for rank, (failure, _) in error.failures.items()}
        rank, first = min(failures.items())
        if not all(isinstance(failure, OSError) for failure in failures.values()):
            raise RuntimeError(f"checkpoint {checkpoint}: {error}") from first
        raise _not_written(checkpoint, rank, first) from first
    return writer.digests


def _finish(checkpoint: Path, note: Note, digests: Mapping[str, Digest], records: Sequence[Path]) -> None:
    folder = folders.unfinished(checkpoint)
    for record in records:
        if record.exists():
            folders.sync(record)
    for name in digests:
        if not (folder / name).exists():
            raise FileNotFoundError(f"{name}, written by another node, is not there: put train.output on a shared disk")
    noted = write_json(folder / NOTE, note)
    write_manifest(folder, {**digests, NOTE: noted})
    folders.finish(checkpoint)


def _by_lead(checkpoint: Path, peers: Peers, do: Callable[[], object]) -> None:
    """The lead does it. Raises CheckpointError on every rank where it could not."""
    failure: OSError | None = None
    if peers.leads:
        try:
            do()
        except OSError as error:
            failure = error
    failure = peers.from_lead(failure)
    if failure is not None:
        raise _not_written(checkpoint, 0, failure) from failure


def _not_written(checkpoint: Path, rank: int, error: BaseException) -> CheckpointError:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return CheckpointError(
        f"{checkpoint}: not written (rank {rank}: {reason}); make room or repair the disk, or lower train.keep_last"
    )


def quiet_alone() -> None:
    """DCP warns of a process without a group, and here it is what is meant. For good: a filter that comes and goes is
    not safe among threads."""
    warnings.filterwarnings("ignore", message=r"torch\.distributed is disabled")


def read_note(checkpoint: Path) -> Note:
    """Raises OSError or ValueError where there is none, or it is not the one that was written."""
    data = (checkpoint / NOTE).read_bytes()
    if digest_of(data) != read_manifest(checkpoint).get(NOTE):
        raise ValueError(f"{NOTE} is damaged")
    note: Note = json.loads(data)
    return note
