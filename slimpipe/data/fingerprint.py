"""What tells one file's contents from another's without reading terabytes."""

from __future__ import annotations

import hashlib
from pathlib import Path

_WHOLE = 64 << 20
_BLOCK = 64 << 10


def fingerprint(path: Path) -> str:
    """sha256 of a file's size and contents: all of them up to 64 MiB, else 1024 blocks of 64 KiB, evenly spread.

    The same on every machine, whatever the file's name and dates. Raises OSError if it cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = file.seek(0, 2)
        digest.update(f"{size}\0".encode())
        blocks = _WHOLE // _BLOCK
        # First and last block included.
        starts = (
            [i * (size - _BLOCK) // (blocks - 1) for i in range(blocks)] if size > _WHOLE else range(0, size, _BLOCK)
        )
        for start in starts:
            file.seek(start)
            digest.update(file.read(_BLOCK))
    return digest.hexdigest()
