"""Ways for a process to die on purpose: at a moment of its writing to the disk. For `Jobs.start(first=...)`."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Any

DISK = ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir")


@dataclass(frozen=True)
class DieAt:
    """On `rank`: SIGKILL before the `count`-th call that changes the disk, or half-way through a file's piece."""

    rank: int
    count: int

    def __call__(self, rank: int) -> None:
        if rank != self.rank:
            return
        left = self.count

        def due() -> bool:
            nonlocal left
            left -= 1
            return left == 0

        for name in DISK:
            setattr(os, name, _deadly(getattr(os, name), due))

        from slimpipe.train.checkpoint import digests

        write = digests._Stream.write

        def write_half(stream: Any, data: Any) -> int:
            if due():
                view = memoryview(data).cast("B")
                stream._file.write(view[: len(view) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return write(stream, data)

        digests._Stream.write = write_half  # type: ignore[method-assign]


def _deadly(call: Any, due: Any) -> Any:
    def deadly(*arguments: Any, **keywords: Any) -> Any:
        if due():
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **keywords)

    return deadly
