"""How commands tell the user what went wrong."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import typer

from slimpipe.config import ConfigError
from slimpipe.schedule import PlanError

# How messages of this project begin that tell the user what to change: `train.device = cuda: ...`, `--prompt: ...`.
_TELLS_THE_USER: Final = re.compile(r"(--[a-z-]+|[a-z]+\.[a-z_0-9]+)( = .+?)?: ")

_LET_THE_FIRST_SPEAK: Final = 5.0  # seconds


@contextmanager
def told_in_one_line(*kinds: type[ValueError]) -> Iterator[None]:
    """Turns errors of the user's into their line and exit code 2; others are bugs and keep their traceback.

    `kinds`: errors that are the user's whatever they say, besides those of settings and schedules.
    """
    try:
        yield
    except ValueError as error:
        if not isinstance(error, (ConfigError, PlanError, *kinds)) and not _TELLS_THE_USER.match(str(error)):
            raise
        if os.environ.get("LOCAL_RANK", "0") == "0":
            typer.echo(str(error), err=True)
        else:
            # torchrun ends a node's other processes when one fails: the one that tells must come first.
            time.sleep(_LET_THE_FIRST_SPEAK)
        raise typer.Exit(2) from error
