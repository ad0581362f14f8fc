"""The run's record: `metrics.jsonl`, a line a step, and TensorBoard events on request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class MetricsFile:
    """Appends to `metrics.jsonl` in the run's folder; every line is on disk before the next step starts."""

    def __init__(self, folder: Path, tensorboard: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._events = _event_writer(folder) if tensorboard else None

    def write(self, row: dict[str, Any]) -> None:
        """One step's numbers; `row["step"]` counts from 1."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        if self._events is not None:
            for key, value in row.items():
                if key != "step" and isinstance(value, (int, float)):
                    self._events.add_scalar(key, value, row["step"])

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()


def _event_writer(folder: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"))
