"""Where the host's time goes in a step: stacks of all threads, looked at once a millisecond, counted by line.

Python's own profilers see one thread, and the backward is autograd's; they slow many short calls down, too.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType

PERIOD = 1e-3
"""Seconds between two looks."""
ROOT = str(Path(__file__).parents[1])
WAITING = ("threading.py", "queue.py", "selectors.py", "socket.py")
"""Files in which a thread that does nothing is found."""


class HostSamples:
    """Looks at the threads of this process while one of them runs a function named `within`."""

    def __init__(self, within: str) -> None:
        self.within = within
        self.looks = 0
        self.lines: Counter[str] = Counter()
        """By the innermost line, wherever it is."""
        self.functions: Counter[str] = Counter()
        """By the innermost function of this repository, whatever it calls included."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> HostSamples:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        own = threading.get_ident()
        while not self._ended.is_set():
            stacks = [_stack(frame) for ident, frame in sys._current_frames().items() if ident != own]
            if any(frame.f_code.co_name == self.within for stack in stacks for frame in stack):
                self.looks += 1
                for stack in stacks:
                    self._count(stack)
            time.sleep(PERIOD)

    def _count(self, stack: list[FrameType]) -> None:
        if stack[0].f_code.co_filename.endswith(WAITING):
            return
        self.lines[_place(stack[0], line=True)] += 1
        for frame in stack:
            if frame.f_code.co_filename.startswith(ROOT):
                self.functions[_place(frame, line=False)] += 1
                return

    def table(self, rows: int = 40) -> str:
        """Shares of the looks; a thread that waits for another one is seen beside it."""
        said = [f"{self.looks} looks"]
        for title, counter in (("function of slimpipe", self.functions), ("innermost line", self.lines)):
            said += [f"-- {title}"]
            said += [f"{count / max(1, self.looks):6.1%}  {place}" for place, count in counter.most_common(rows)]
        return "\n".join(said)


def _stack(frame: FrameType | None) -> list[FrameType]:
    """Innermost first."""
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _place(frame: FrameType, line: bool) -> str:
    file = frame.f_code.co_filename
    file = file.removeprefix(ROOT + "/") if file.startswith(ROOT) else "/".join(file.split("/")[-3:])
    return f"{file}:{frame.f_lineno if line else frame.f_code.co_name}"
