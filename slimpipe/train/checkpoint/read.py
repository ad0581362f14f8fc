"""Reads a checkpoint: any part of any tensor, whatever the layout of the run that wrote it. Executes nothing of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from slimpipe.train.checkpoint import digests
from slimpipe.train.checkpoint.errors import CheckpointError
from slimpipe.train.checkpoint.metadata import SafeReader
from slimpipe.train.checkpoint.parts import Part, PartsToLoad, State, stored
from slimpipe.train.checkpoint.write import alone_on_purpose

T = TypeVar("T")

WEIGHT: Final = "model."
"""Begins the name of a weight in a checkpoint: fp32, by its layout-free name in the model."""


def read(checkpoint: Path, state: State) -> None:
    """Fills the parts, of any dtype and device, with what the checkpoint holds. Not collective.

    The files are taken as verified. Raises CheckpointError, naming the first tensor that is missing or has another
    shape, or saying what cannot be read.
    """
    with alone_on_purpose():
        _readable(checkpoint, lambda: _load(checkpoint, state))


def _load(checkpoint: Path, state: State) -> None:
    metadata_complaints = logging.getLogger("torch.distributed.checkpoint.state_dict_loader")
    level = metadata_complaints.level
    metadata_complaints.setLevel(logging.ERROR)  # a warning with a traceback, before the error itself
    try:
        dcp.load(dict(state), storage_reader=SafeReader(checkpoint), planner=PartsToLoad(checkpoint), no_dist=True)
    finally:
        metadata_complaints.setLevel(level)


def verify(checkpoint: Path) -> None:
    """Raises CheckpointError where a file is missing, truncated or damaged."""
    found = digests.faults(checkpoint)
    if found:
        raise CheckpointError(f"{checkpoint}: {found[0]}; use another checkpoint")


def weight_shapes(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every weight by its layout-free name. Raises CheckpointError for a damaged checkpoint."""
    entries = _metadata(checkpoint).state_dict_metadata
    return {
        name.removeprefix(WEIGHT): tuple(entry.size)
        for name, entry in entries.items()
        if name.startswith(WEIGHT) and isinstance(entry, TensorStorageMetadata)
    }


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    """Every weight of the model, fp32 on the host, by its layout-free name; no optimizer state.

    Verifies the files first. Raises CheckpointError for a damaged checkpoint.
    """
    verify(checkpoint)
    entries = _metadata(checkpoint).state_dict_metadata
    weights = {
        name.removeprefix(WEIGHT): torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if name.startswith(WEIGHT) and isinstance(entry, TensorStorageMetadata)
    }
    read(checkpoint, {f"{WEIGHT}{name}": Part.whole(weight) for name, weight in weights.items()})
    return weights


def load_weights(checkpoint: Path, weights: Mapping[str, Tensor | Part], verified: bool = False) -> None:
    """Fills weights of the model, whole or parts, of any dtype and device, by layout-free name. Not collective.

    Verifies the files first, unless that is done. Raises CheckpointError for a damaged checkpoint, and naming the first
    weight that is missing or has another shape.
    """
    if not verified:
        verify(checkpoint)
    parts = {name: weight if isinstance(weight, Part) else Part.whole(weight) for name, weight in weights.items()}
    metadata = _metadata(checkpoint)
    for name in parts:
        stored(metadata, f"{WEIGHT}{name}", checkpoint)
    with torch.no_grad():
        read(checkpoint, {f"{WEIGHT}{name}": part for name, part in parts.items()})


def _metadata(checkpoint: Path) -> Metadata:
    return _readable(checkpoint, lambda: SafeReader(checkpoint).read_metadata())


def _readable(checkpoint: Path, read: Callable[[], T]) -> T:
    """What `read` gives. Raises CheckpointError for whatever a damaged file makes of it."""
    try:
        return read()
    except CheckpointError:
        raise
    # DCP's own exception is not an Exception; a damaged pickle may raise any.
    except (Exception, CheckpointException) as error:
        cause: BaseException = error
        if isinstance(error, CheckpointException):
            cause = next(iter(error.failures.values()))[0]
            if isinstance(cause, CheckpointError):
                raise cause from None
        reason = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
        raise CheckpointError(f"{checkpoint}: cannot be read ({reason[:200]}); use another checkpoint") from error
