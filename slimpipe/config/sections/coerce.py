"""What a YAML file may write for a value, besides the value itself."""

from __future__ import annotations

from typing import Any


def as_tuple(value: Any) -> Any:
    """YAML has lists; a frozen section holds tuples."""
    return tuple(value) if isinstance(value, list) else value


def zero_is_null(value: Any) -> Any:
    return None if value == 0 and not isinstance(value, bool) else value
