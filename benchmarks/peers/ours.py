"""slimpipe, as benchmarks.pipeline measures it. Keys of a case: n, v, recompute, vocab, exchange, hardware."""

from __future__ import annotations

from typing import Any

from benchmarks.jobs import Case
from benchmarks.pipeline import measure
from slimpipe.config import Config
from slimpipe.parallel.mesh import Processes


def run(config: Config, case: Case, processes: Processes) -> dict[str, Any] | None:
    return measure(config, case, processes)
