"""Checkpoints through torch.distributed.checkpoint, under names that do not depend on the layout.

A checkpoint holds fp32 weights (`model.<name>`), the optimizer's moments (`optimizer.<name>.exp_avg`, `.exp_avg_sq`)
and the number of steps done (`step`). It is written beside its place and renamed into it: a half-written one is never
found.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

T = TypeVar("T")


class CheckpointError(ValueError):
    """A checkpoint is missing, or is not what the settings describe."""


def save(folder: Path, state: Mapping[str, Tensor], lead: bool) -> Path:
    """Writes this rank's part of `state`; collective over the default process group. Returns the checkpoint's folder.

    A name given by several ranks must hold the same values on each. `lead` is true on one rank, which renames.
    """
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    if lead:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(unfinished, ignore_errors=True)
    _meet()
    with _alone_on_purpose():
        dcp.save(dict(state), checkpoint_id=unfinished, no_dist=not dist.is_initialized())
    _meet()
    if lead:
        if folder.exists():
            shutil.rmtree(folder)
        unfinished.rename(folder)
    _meet()
    return folder


def _readable(checkpoint: Path, read: Callable[[], T]) -> T:
    """What `read` gives. Raises CheckpointError for whatever a damaged file makes of it."""
    try:
        return read()
    # DCP's own exception is not an Exception; a damaged pickle may raise any.
    except (Exception, CheckpointException) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{checkpoint}: cannot be read ({reason[:200]}); use another checkpoint") from error


@contextmanager
def _alone_on_purpose() -> Iterator[None]:
    """One process without a process group: DCP warns of it, and it is what is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed.checkpoint")
        yield


def _meet() -> None:
    if dist.is_initialized():
        token = torch.zeros(1, device="cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(token)
        token.item()


def newest(run: Path) -> Path:
    """The run's checkpoint of the highest step. Raises CheckpointError where there is none."""
    steps = {path: path.name.removeprefix("step_") for path in (run / "checkpoints").glob("step_*")}
    found = sorted((path for path, step in steps.items() if step.isdecimal()), key=lambda path: int(steps[path]))
    if not found:
        raise CheckpointError(
            f"{run}: no checkpoint in {run / 'checkpoints'}; give the folder of a finished run (train.output)"
        )
    return found[-1]


def place(run: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps belongs."""
    return run / "checkpoints" / f"step_{step}"


def load_weights(checkpoint: Path, weights: Mapping[str, Tensor]) -> None:
    """Fills `weights` (any dtype and device) from a checkpoint, in one process and without a process group.

    Raises CheckpointError, naming the first weight that is missing or has another shape.
    """
    stored: dict[str, Any] = _readable(checkpoint, FileSystemReader(checkpoint).read_metadata).state_dict_metadata
    target: dict[str, Tensor] = {}
    for name, weight in weights.items():
        entry = stored.get(f"model.{name}")
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{checkpoint}: holds no weight {name}; is config.yaml the one it was trained with?")
        if entry.size != weight.shape:
            raise CheckpointError(
                f"{checkpoint}: {name} has shape {tuple(entry.size)}, the settings say {tuple(weight.shape)}; "
                "use the config.yaml it was trained with"
            )
        target[f"model.{name}"] = torch.empty(entry.size, dtype=entry.properties.dtype)
    with _alone_on_purpose():
        _readable(checkpoint, lambda: dcp.load(target, checkpoint_id=checkpoint, no_dist=True))
    for name, weight in weights.items():
        weight.copy_(target[f"model.{name}"])
