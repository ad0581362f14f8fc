"""Reads a checkpoint: any part of any tensor, whatever the layout of the run that wrote it. Executes nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from slimpipe.train.checkpoint import digests
from slimpipe.train.checkpoint.errors import CheckpointError
from slimpipe.train.checkpoint.metadata import SafeReader
from slimpipe.train.checkpoint.parts import Part, PartsToLoad, State, stored
from slimpipe.train.checkpoint.write import quiet_alone

T = TypeVar("T")

WEIGHT: Final = "model."
"""Begins the name of a weight in a checkpoint: fp32, by its layout-free name in the model."""


def read(checkpoint: Path, state: State) -> None:
    """Fills the parts, of any dtype and device, with what the checkpoint holds. Not collective.

    The files are taken as verified. Raises CheckpointError, naming the first tensor that is missing or has another
    shape, or saying what cannot be read.
    """
    reader = _reader(checkpoint)
    quiet_alone()
    planner = PartsToLoad(checkpoint)
    _readable(checkpoint, lambda: dcp.load(dict(state), storage_reader=reader, planner=planner, no_dist=True))


def verify(checkpoint: Path) -> None:
    """Raises CheckpointError where a file is missing, truncated or damaged."""
    found = digests.faults(checkpoint)
    if found:
        raise CheckpointError(f"{checkpoint}: {found[0]}; use another checkpoint")


def shapes(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor by its whole name. Raises CheckpointError for a damaged checkpoint."""
    entries = _reader(checkpoint).metadata.state_dict_metadata
    return {name: tuple(entry.size) for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def weight_shapes(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every weight by its layout-free name. Raises CheckpointError for a damaged checkpoint."""
    return {name.removeprefix(WEIGHT): size for name, size in shapes(checkpoint).items() if name.startswith(WEIGHT)}


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    """Every weight of the model, fp32 on the host, by its layout-free name; no optimizer state.

    Verifies the files first. Raises CheckpointError for a damaged checkpoint.
    """
    verify(checkpoint)
    entries = _reader(checkpoint).metadata.state_dict_metadata
    weights = {
        name.removeprefix(WEIGHT): torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if name.startswith(WEIGHT) and isinstance(entry, TensorStorageMetadata)
    }
    read(checkpoint, {f"{WEIGHT}{name}": Part.whole(weight) for name, weight in weights.items()})
    return weights


def read_tensor(checkpoint: Path, name: str) -> Tensor | None:
    """A tensor by its whole name; None where there is none."""
    entry = _reader(checkpoint).metadata.state_dict_metadata.get(name)
    if not isinstance(entry, TensorStorageMetadata):
        return None
    tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
    read(checkpoint, {name: Part.whole(tensor)})
    return tensor


def load_weights(checkpoint: Path, weights: Mapping[str, Tensor | Part], verified: bool = False) -> None:
    """Fills weights of the model, whole or parts, of any dtype and device, by layout-free name. Not collective.

    Verifies the files first, unless that is done. Raises CheckpointError for a damaged checkpoint, and naming the first
    weight that is missing or has another shape.
    """
    if not verified:
        verify(checkpoint)
    parts = {name: weight if isinstance(weight, Part) else Part.whole(weight) for name, weight in weights.items()}
    metadata = _reader(checkpoint).metadata
    for name in parts:
        stored(metadata, f"{WEIGHT}{name}", checkpoint)
    with torch.no_grad():
        read(checkpoint, {f"{WEIGHT}{name}": part for name, part in parts.items()})


def _reader(checkpoint: Path) -> SafeReader:
    return _readable(checkpoint, lambda: SafeReader(checkpoint))


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
