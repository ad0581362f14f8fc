"""Saves a run's checkpoints beside its steps: one at a time, in a thread, and keeps as many as were asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import torch

from slimpipe.runtime.watchdog import Progress
from slimpipe.train.checkpoint import folders
from slimpipe.train.checkpoint.errors import CheckpointError
from slimpipe.train.checkpoint.parts import State
from slimpipe.train.checkpoint.peers import Peers
from slimpipe.train.checkpoint.staging import Staging
from slimpipe.train.checkpoint.write import Note, write

WRITER: Final = "checkpoint"
"""The name of the thread that writes."""
ENDING: Final = 10.0
"""Seconds for a thread that has written to let go of what it held. One that does so while the interpreter ends, and is
inside of torch, ends the process with SIGABRT and "terminate called without an active exception"."""


class _Writing(NamedTuple):
    future: Future[list[str]]
    thread: threading.Thread


@dataclass(frozen=True)
class Keeping:
    """How many stay: the last `last`, and for good those after a multiple of `every` steps."""

    last: int
    every: int | None = None


class Saver:
    """Every rank has one; `save` is collective. Checkpoints are written in the order of the steps.

    The thread talks to the other ranks' threads over `peers`, which nobody else may use.
    """

    def __init__(
        self,
        run: Path,
        peers: Peers,
        keeping: Keeping,
        seconds: float,
        progress: Progress,
        records: Sequence[Path] = (),
    ) -> None:
        """A checkpoint that takes more than `seconds` has failed. `records` are on disk before one is there: files of
        the lead's that tell of the steps before it."""
        self._run, self._peers, self._keeping = run, peers, keeping
        self._seconds, self._progress, self._records = seconds, progress, records
        self._staging: Staging | None = None
        self._writing: tuple[Path, _Writing] | None = None

    def go_beside_steps(self, state: State, device: torch.device) -> None:
        """From now on `save` returns once the state may change under `hold`: host memory for a copy of it is taken.

        Raises CheckpointError where there is not enough.
        """
        self._staging = Staging(state, device)

    def save(self, state: State, note: Note, step: int) -> list[str]:
        """Begins a checkpoint of `state` after `step` steps. What `told` says of the one before, if it had to be
        waited for. Where nobody has called `go_beside_steps`, the state must stay as it is until this one is told."""
        lines = self.told(patiently=True)
        checkpoint, staging = folders.place(self._run, step), self._staging
        if staging is not None:
            state = staging.copy(state)
        self._writing = checkpoint, _in_a_thread(lambda: self._write(checkpoint, state, note, staging))
        return lines

    def hold(self) -> None:
        """To be called before the state changes."""
        if self._staging is not None and self._writing is not None:
            self._staging.hold()

    def told(self, patiently: bool = False, at_the_end: bool = False) -> list[str]:
        """Lines on the checkpoint that was being written, if it is done. `patiently` waits for it.

        One that could not be written is told, and `at_the_end` raises CheckpointError.
        """
        if self._writing is None or not (patiently or at_the_end or self._writing[1].future.done()):
            return []
        checkpoint, writing = self._writing
        self._wait(checkpoint, writing.future)
        writing.thread.join(ENDING)
        self._writing = None
        try:
            return [f"checkpoint: {checkpoint}", *writing.future.result()]
        except CheckpointError as error:
            if at_the_end:
                raise
            return [f"checkpoint {error}; training goes on without it"]

    def finish(self) -> list[str]:
        """`told` at the end, and the end of the copies."""
        try:
            return self.told(at_the_end=True)
        finally:
            if self._staging is not None:
                self._staging.close()

    def _wait(self, checkpoint: Path, future: Future[list[str]]) -> None:
        if future.done():
            return
        with self._progress.patience(f"waiting for {checkpoint.name} to be written"):
            if wait([future], timeout=self._seconds).not_done:
                raise CheckpointError(
                    f"{checkpoint}: still not written after {self._seconds:g} s (train.checkpoint_seconds)"
                )

    def _write(self, checkpoint: Path, state: State, note: Note, staging: Staging | None) -> list[str]:
        """In the thread. Lines on what else went wrong."""
        if staging is not None:
            staging.wait()
        write(checkpoint, state, note, self._peers, self._records)
        if not self._peers.leads:
            return []
        try:
            folders.thin_out(self._run, folders.step_of(checkpoint), self._keeping.last, self._keeping.every)
        except OSError as error:
            return [f"checkpoint: an old one cannot be removed ({error.strerror or error}): {error.filename}"]
        return []


def _in_a_thread(do: Callable[[], list[str]]) -> _Writing:
    """What `do` gives or raises. A process that ends does not wait for it: the disk may hang."""
    future: Future[list[str]] = Future()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # a thread starts with the first
            future.set_result(do())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name=WRITER, daemon=True)
    thread.start()
    return _Writing(future, thread)
