"""Clock and power of the GPUs while something runs, as nvidia-smi samples them.

They say why a kernel in the middle of a step can be slower than the same kernel alone, by which rates are calibrated: a
GPU at its power limit lowers its clock.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterable
from typing import IO, Any

QUERY = "clocks.sm,clocks.max.sm,power.draw,power.limit"
PERIOD_MS = 200


class Clocks:
    """Samples from `start` to `stop`; nothing where nvidia-smi is missing."""

    def __init__(self) -> None:
        self._running: tuple[subprocess.Popen[bytes], IO[bytes]] | None = None

    def start(self) -> None:
        if shutil.which("nvidia-smi") is None:
            return
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        only = [f"--id={visible}"] if visible else []
        command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits", f"--loop-ms={PERIOD_MS}"]
        sink = tempfile.TemporaryFile()  # noqa: SIM115 (`stop` closes it)
        self._running = subprocess.Popen([*command, *only], stdout=sink, stderr=subprocess.DEVNULL), sink

    def stop(self) -> dict[str, float]:
        """`sm_mhz`, `sm_mhz_max`, `power_w`, `power_limit_w`: medians over samples and GPUs. Empty without samples."""
        if self._running is None:
            return {}
        process, sink = self._running
        self._running = None
        process.terminate()
        process.wait(10)
        with sink:
            sink.seek(0)
            return summary(sink.read().decode(errors="replace").splitlines())


def summary(lines: Iterable[str]) -> dict[str, float]:
    """Of lines of numbers as `QUERY` names them; lines cut short and values that a GPU does not tell are left out."""
    samples: list[list[float]] = []
    for line in lines:
        try:
            samples.append([float(field) for field in line.split(",")])
        except ValueError:
            continue
    whole = [sample for sample in samples if len(sample) == len(QUERY.split(","))]
    columns: Any = zip(*whole, strict=True)
    keys = ("sm_mhz", "sm_mhz_max", "power_w", "power_limit_w")
    return {key: statistics.median(column) for key, column in zip(keys, columns, strict=bool(whole))}
