"""SIGTERM and SIGINT ask a run to save and end; a second one ends the process at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final

from slimpipe.train.checkpoint import Peers

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_ONE_REQUEST: Final = 1.0
"""Seconds. A job manager signals a job's every process, and the launcher hands on what it gets: that is one request."""


class Stop:
    """Within it (a context, in the main thread), signals are requests."""

    def __init__(self, leave: Callable[[int], Any] = os._exit) -> None:
        self._leave = leave
        self._signal, self._since = 0, 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        self._before = {number: signal.signal(number, self._requested) for number in _SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def release(self) -> None:
        """Signals are what they were before."""
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)

    def agreed(self, peers: Peers) -> str | None:
        """The signal that asked some rank to stop, the same on every rank; collective. None: go on."""
        number = peers.largest(self._signal)
        return signal.Signals(number).name if number else None

    @property
    def requested(self) -> bool:
        """Whether this process has been asked."""
        return self._signal != 0

    def _requested(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._signal:
            self._signal, self._since = number, now
        elif now - self._since > _ONE_REQUEST:
            self._leave(128 + number)
