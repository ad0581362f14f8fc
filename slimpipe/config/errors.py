"""The one error of the settings."""

from __future__ import annotations

from collections.abc import Iterable


class ConfigError(ValueError):
    """The settings are wrong. `lines` has one line for each problem: the dotted key, its value, what is allowed.

    str() of the error is these lines, ready for stderr.
    """

    def __init__(self, lines: Iterable[str]) -> None:
        self.lines = tuple(lines)
        super().__init__("\n".join(self.lines))
