"""Names each rank's current action when nothing moves, and ends the job.

A hang in a pipeline shows on every rank at once, and only one of them is to blame. Each rank's watchdog is a thread.
The first to see no progress raises an alarm in the job's store; every rank prints its threads' stacks and answers with
what it is doing; one prints the table. A rank that does not answer is named too: its process is gone, or holds the
interpreter's lock.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

Report = dict[str, Any]


class Progress:
    """What this rank is doing, and a count that rises with every change. `listener`, if set, is told of each."""

    def __init__(self) -> None:
        self.doing, self.count = "starting", 0
        self.listener: Callable[[str], None] | None = None
        self.patient = False
        """While true, standing still is no reason for alarm."""

    def now(self, what: str) -> None:
        self.doing = what
        self.count += 1
        if self.listener is not None:
            self.listener(what)

    @contextmanager
    def patience(self, what: str) -> Iterator[None]:
        """While this lasts, which depends on a disk alone or has a limit of its own."""
        self.now(what)
        self.patient = True
        try:
            yield
        finally:
            self.patient = False
            self.count += 1


class Watchdog:
    """Watches `progress`; after `seconds` without a change reports every rank's action and ends the process.

    `device_doing` says what the device has not finished, if there is one (the host runs ahead of it). `leave` is called
    last, with the exit code; tests replace it.
    """

    def __init__(
        self,
        progress: Progress,
        seconds: float,
        rank: int,
        world: int,
        store: dist.Store | None,
        device_doing: Callable[[], str | None],
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        self._progress, self._seconds, self._rank, self._world = progress, seconds, rank, world
        # A store's connection serves one request at a time, and the main thread may be blocked in one.
        self._store = None if store is None else dist.PrefixStore("watchdog", store.clone())  # type: ignore[attr-defined]
        self._device_doing, self._leave = device_doing, leave
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=5)

    def _watch(self) -> None:
        seen, since = self._progress.count, time.monotonic()
        pause = min(self._seconds / 5, 5.0)
        while not self._stopped.wait(pause):
            if self._progress.count != seen or self._progress.patient:
                seen, since = self._progress.count, time.monotonic()
            stalled = time.monotonic() - since
            if stalled >= self._seconds or self._alarmed():
                self._report(stalled)
                return

    def _alarmed(self) -> bool:
        try:
            return self._store is not None and bool(self._store.check(["alarm"]))
        except RuntimeError:
            # The store's server has gone, with the process that hosted it: the launcher ends this one.
            return False

    def _report(self, stalled: float) -> None:
        message: Report = {"doing": self._progress.doing, "device": None, "seconds": round(stalled, 1)}
        # Before this rank answers: once every rank has, the first to leave takes the others down with it.
        self._print_stacks()
        try:
            message["device"] = self._device_doing()
            self._tell(message)
        except RuntimeError:
            # The device is in error, or the store has gone with its server: what this rank knows is told still.
            self._print({self._rank: message})
        self._leave(1)

    def _tell(self, message: Report) -> None:
        """Puts this rank's report with the others'; the first rank to do so prints them all."""
        if self._store is None:
            self._print({self._rank: message})
            return
        self._store.set(f"rank{self._rank}", json.dumps(message))
        if self._store.add("alarm", 1) == 1:
            self._print(self._gather())
            self._store.set("printed", "yes")
        else:
            self._wait_for("printed", 2 * self._patience())

    def _patience(self) -> float:
        """Every rank polls at least this often."""
        return 2 * min(self._seconds / 5, 5.0) + 1.0

    def _wait_for(self, key: str, seconds: float) -> bool:
        assert self._store is not None
        end = time.monotonic() + seconds
        # Looks once in any case: behind a rank that used up the time, others may have answered long ago.
        while not self._store.check([key]):
            if time.monotonic() >= end:
                return False
            time.sleep(0.05)
        return True

    def _gather(self) -> dict[int, Report | None]:
        assert self._store is not None
        end = time.monotonic() + self._patience()
        found: dict[int, Report | None] = {}
        for rank in range(self._world):
            arrived = self._wait_for(f"rank{rank}", max(0.0, end - time.monotonic()))
            found[rank] = json.loads(self._store.get(f"rank{rank}")) if arrived else None
        return found

    def _print(self, reports: Mapping[int, Report | None]) -> None:
        lines = [
            f"watchdog: no progress for {self._seconds:g} s (train.watchdog_seconds); every rank's current action:"
        ]
        for rank, report in sorted(reports.items()):
            if report is None:
                lines.append(f"  rank {rank}: no answer (its process is gone or stuck outside Python)")
                continue
            device = f"; the device is at {report['device']}" if report["device"] else ""
            lines.append(f"  rank {rank}: {report['doing']}, unchanged for {report['seconds']} s{device}")
        self._write("\n".join(lines) + "\n")

    def _print_stacks(self) -> None:
        with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
            faulthandler.dump_traceback(file=file)
            file.seek(0)
            self._write(f"watchdog: where rank {self._rank} stands:\n{file.read()}")

    @staticmethod
    def _write(text: str) -> None:
        """In one write, for the ranks share the pipe."""
        sys.stderr.write(text)
        sys.stderr.flush()
