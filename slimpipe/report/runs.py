"""A run's folder as the page wants it: series of numbers by step, what was told, and how it was set up."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Series = list[tuple[int, float | None]]
"""(step, number), ascending; None where the number was not finite: a gap."""


class ReportError(ValueError):
    """A folder holds no run, or one without a step."""


@dataclass(frozen=True)
class Run:
    """`rows`: by step, ascending; of a step that a resumed run did again the later row."""

    name: str
    rows: dict[int, dict[str, Any]]
    settings: Mapping[str, Any]

    def series(self, key: str, rank: int | None = None) -> Series:
        """The number `key` of every row that has it; of a list, that of one rank."""
        found: Series = []
        for step, row in self.rows.items():
            if key not in row:
                continue
            value = row[key]
            if rank is not None:
                value = value[rank] if isinstance(value, list) and rank < len(value) else None
            found.append((step, float(value) if _is_number(value) else None))
        return found

    def ranks(self, key: str) -> int:
        """How many ranks the list `key` is of."""
        return max((len(row[key]) for row in self.rows.values() if isinstance(row.get(key), list)), default=0)

    def usual(self, key: str) -> float | None:
        """The median of the second half of the run: its start, with cold caches, is not what it does."""
        known = [value for _, value in self.series(key) if value is not None]
        return statistics.median(known[len(known) // 2 :]) if known else None

    def last(self, key: str) -> float | None:
        return next((value for _, value in reversed(self.series(key)) if value is not None), None)

    @property
    def skipped(self) -> int:
        return sum(bool(row.get("skipped")) for row in self.rows.values())

    def notes(self) -> Iterator[tuple[int, str]]:
        """(step, what was told of it)."""
        for step, row in self.rows.items():
            for note in row.get("notes", []):
                yield step, str(note)

    @property
    def layout(self) -> str:
        """`slimpipe, pp 2, v 1, n 16`; empty where the settings are not known."""
        pipeline, parallel = (self.settings.get(section) or {} for section in ("pipeline", "parallel"))
        if not pipeline:
            return ""
        schedule, exchange = pipeline.get("schedule", "slimpipe"), pipeline.get("exchange", "off")
        shape = f"pp {parallel.get('pp', 1)}, v {pipeline.get('virtual_stages', 1)}, n {pipeline.get('slices', 1)}"
        return f"{schedule}, {shape}" + ("" if exchange == "off" else f", exchange {exchange}")


def read_run(folder: Path) -> Run:
    """Reads `folder` (a run's `train.output`, or its metrics.jsonl). Raises ReportError with the remedy."""
    path = folder if folder.suffix == ".jsonl" else folder / "metrics.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        reason = f"cannot be read ({error.strerror}); give the folder of a run (its train.output)"
        raise ReportError(f"{path}: {reason}") from error
    except UnicodeDecodeError as error:
        raise ReportError(f"{path}: not a UTF-8 text; give the folder of a run (its train.output)") from error
    rows: dict[int, dict[str, Any]] = {}
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue  # cut by a kill in mid-write
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            # Evaluations have rows of their own, for the same steps.
            again = "loss" in row and "loss" in rows.get(row["step"], {})
            rows[row["step"]] = row if again else {**rows.get(row["step"], {}), **row}
    if not rows:
        raise ReportError(f"{path}: holds no step yet; wait for the first one")
    settings = _settings(path.parent / "config.yaml")
    return Run(path.resolve().parent.name, dict(sorted(rows.items())), settings)


def _settings(path: Path) -> Mapping[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
