"""What is wrong with somebody's weights."""

from __future__ import annotations


class WeightsError(ValueError):
    """One line: the file or folder, the tensor or key, what it has and what it should have."""
