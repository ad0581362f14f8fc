"""How much host memory may still be taken: by the kernel's count, and by the limit of a container."""

from __future__ import annotations

from pathlib import Path


def available(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes; None where the system does not say.

    Pinned memory cannot be swapped out, and a system that runs out of it kills processes: better to ask first.
    """
    found = [bytes for bytes in (_free(meminfo), _left(cgroup)) if bytes is not None]
    return min(found, default=None)


def _free(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


def _left(cgroup: Path) -> int | None:
    """Of a version 2 control group; its page cache would make room, and counts as free."""
    try:
        most = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
        lines = (cgroup / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    if most == "max":
        return None
    cached = sum(int(line.split()[1]) for line in lines if line.split()[0] in ("inactive_file", "active_file"))
    return max(0, int(most) - used + cached)
