"""The run's record: `metrics.jsonl`, a line a step, and the same to TensorBoard and Weights & Biases on request."""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slimpipe.train.checkpoint import CheckpointError
from slimpipe.train.rows import METRICS, last_step

if TYPE_CHECKING:
    from slimpipe.config import Config

Row = Mapping[str, Any]


@dataclass(frozen=True)
class StepRecord:
    """What is kept and shown of a step; docs/metrics.md says what the fields are."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    seconds: float
    tokens_per_s: float
    tflops: float | None
    mfu: float | None
    bubble: float
    bubble_by_rank: tuple[float, ...]
    waits: dict[str, float]
    peak_memory_bytes_by_rank: tuple[int, ...]
    busy_seconds_by_rank: tuple[float, ...]
    exchange: dict[str, Any] | None
    skipped: bool
    notes: tuple[str, ...]
    swap: dict[str, Any] | None = None
    carriers: str | None = None

    def row(self) -> dict[str, Any]:
        """As `metrics.jsonl` has it: no key for what there is nothing to say of."""
        row = dict(vars(self), peak_memory_bytes=max(self.peak_memory_bytes_by_rank))
        return {key: value for key, value in row.items() if not (value is None or value is False or value == ())}


class Sink(Protocol):
    """Takes rows beside the file."""

    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


class MetricsFile:
    """Appends to `metrics.jsonl` in the run's folder; every line is with the system before the next step starts."""

    def __init__(self, folder: Path, *sinks: Sink) -> None:
        self._path = folder / METRICS
        # Unbuffered: what could not be written is not tried again at the end.
        self._file = self._path.open("ab", buffering=0)
        self._sinks = sinks

    def write(self, row: Row) -> None:
        """One step's numbers; `row["step"]` counts from 1. A number that is not finite becomes null.

        Raises CheckpointError where the disk takes no more.
        """
        line = (json.dumps(_finite(row), allow_nan=False) + "\n").encode()
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise CheckpointError(
                f"{self._path}: cannot be written ({error.strerror}); make room, then the same command goes on from "
                "the last checkpoint"
            ) from error
        for sink in self._sinks:
            sink.write(row)

    def close(self) -> None:
        self._file.close()
        for sink in self._sinks:
            sink.close()


class TensorBoard:
    """Events in the run's folder, a curve a number. Those of steps that are done again give way to the new ones."""

    def __init__(self, folder: Path, done: int = 0) -> None:
        """`done`: steps that are on record."""
        from torch.utils.tensorboard import SummaryWriter

        self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1 if done else None)

    def write(self, row: Row) -> None:
        for name, value in numbers(row):
            self._events.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._events.close()


class WeightsAndBiases:
    """A run of the project `log.wandb`, under one id for all parts of a resumed run. `WANDB_MODE=offline` keeps it on
    this machine."""

    def __init__(self, folder: Path, config: Config) -> None:
        import wandb

        place = folder / "wandb_id"
        if not place.exists():
            place.write_text(secrets.token_hex(4), encoding="utf-8")
        self._run = wandb.init(
            project=config.log.wandb,
            name=folder.resolve().name,
            dir=str(folder),
            id=place.read_text(encoding="utf-8"),
            resume="allow",
            config=config.model_dump(mode="json"),
        )

    def write(self, row: Row) -> None:
        self._run.log(dict(numbers(row)), step=row["step"])

    def close(self) -> None:
        self._run.finish()


def open_metrics(config: Config) -> MetricsFile:
    """The run's record with what `log` asks for."""
    folder = Path(config.train.output)
    folder.mkdir(parents=True, exist_ok=True)
    sinks: list[Sink] = []
    if config.log.tensorboard:
        sinks.append(TensorBoard(folder, last_step(folder)))
    if config.log.wandb is not None:
        sinks.append(WeightsAndBiases(folder, config))
    return MetricsFile(folder, *sinks)


def numbers(row: Row) -> Iterator[tuple[str, float]]:
    """Every number of a row by name, `waits/F` and `peak_memory_bytes_by_rank/3` too; not the step."""
    for key, value in row.items():
        if isinstance(value, Mapping):
            inside = list(value.items())
        elif isinstance(value, (list, tuple)):
            inside = list(enumerate(value))
        else:
            inside = []
            if key != "step" and isinstance(value, (int, float)):
                yield key, value
        yield from ((f"{key}/{name}", number) for name, number in inside if isinstance(number, (int, float)))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
