"""`metrics.jsonl` of a run that goes on: rows of steps that will be done again are taken out."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

METRICS: Final = "metrics.jsonl"
DROPPED: Final = "metrics.dropped.jsonl"


def keep_rows(folder: Path, step: int) -> int:
    """Moves rows of later steps than `step`, and what is no whole row, to `metrics.dropped.jsonl`; how many.

    On disk when it returns; whatever moment the process dies at, no row is lost.
    """
    path = folder / METRICS
    if not path.exists():
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    dropped = [line for line in lines if not _stays(line, step)]
    if not dropped:
        return 0
    with (folder / DROPPED).open("ab") as file:
        file.writelines(line if line.endswith(b"\n") else line + b"\n" for line in dropped)
        file.flush()
        os.fsync(file.fileno())
    rewritten = folder / f".{METRICS}.new"
    with rewritten.open("wb") as file:
        file.writelines(line for line in lines if _stays(line, step))
        file.flush()
        os.fsync(file.fileno())
    rewritten.replace(path)
    return len(dropped)


def last_step(folder: Path) -> int:
    """Step of the last row; 0 where there is none."""
    path = folder / METRICS
    lines = path.read_bytes().splitlines() if path.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def _stays(line: bytes, step: int) -> bool:
    """A row without a step is of none that will be done again."""
    if not line.endswith(b"\n"):
        return False
    try:
        row = json.loads(line)
        return isinstance(row, dict) and int(row.get("step", 0)) <= step
    except (ValueError, TypeError):
        return False
