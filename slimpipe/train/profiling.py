"""`train.profile`: traces of chosen steps on chosen ranks by torch's profiler, every action under its own name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from slimpipe.runtime.watchdog import Progress

if TYPE_CHECKING:
    from slimpipe.config import Config


class Profiling:
    """One rank's traces: `profile/step_<n>_rank_<r>.json.gz` in the run's folder, for Perfetto or chrome://tracing."""

    def __init__(self, config: Config, rank: int, progress: Progress) -> None:
        chosen = config.train.profile
        self._steps = frozenset() if chosen is None or rank not in chosen.ranks else frozenset(chosen.steps)
        self._folder, self._rank, self._progress = Path(config.train.output) / "profile", rank, progress

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Traces what runs inside if step `number` (from 1) is one of the chosen; costs nothing else."""
        if number not in self._steps:
            yield
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        with profile(activities=activities) as found, _Ranges(self._progress):
            yield
        with self._progress.patience("writing a trace"):
            self._folder.mkdir(parents=True, exist_ok=True)
            found.export_chrome_trace(str(self._folder / f"step_{number}_rank_{self._rank}.json.gz"))


class _Ranges:
    """Every change of progress ends a range in the trace and begins the next, named by what is being done."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._open: Any = None

    def __enter__(self) -> None:
        self._progress.listener = self._change

    def __exit__(self, *_: object) -> None:
        self._progress.listener = None
        self._close()

    def _change(self, what: str) -> None:
        self._close()
        self._open = record_function(what)
        self._open.__enter__()

    def _close(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None
