"""Rows of a results file: JSON lines, each carrying where, when and by which command it was measured."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table


def circumstances(command: str) -> dict[str, str]:
    """Machine, versions, commit, date, command. SLIMPIPE_COMMIT names the commit where there is no git checkout."""
    if torch.cuda.is_available():
        machine = f"{torch.cuda.device_count()}x {torch.cuda.get_device_name()}"
        versions = (
            f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, NCCL {torch.cuda.nccl.version()}"
        )
    else:
        machine = f"{os.cpu_count()} CPU cores, {platform.machine()}"
        versions = f"torch {torch.__version__}"
    return {
        "machine": machine,
        "versions": f"{versions}, Python {platform.python_version()}",
        "commit": os.environ.get("SLIMPIPE_COMMIT") or _commit(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": command,
    }


def _commit() -> str:
    try:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def append(path: Path, row: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def table(rows: list[dict[str, Any]], columns: dict[str, str], title: str) -> None:
    """Prints `columns` (key -> format spec) of the rows."""
    shown = Table(title=title)
    for key in columns:
        shown.add_column(key.replace("_", " "), justify="right")
    for row in rows:
        shown.add_row(*(format(row[key], spec) if row.get(key) is not None else "-" for key, spec in columns.items()))
    Console(width=200).print(shown)
