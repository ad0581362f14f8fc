"""Checks of the settings against where they run, made before any process group starts."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from slimpipe.config.errors import ConfigError
from slimpipe.config.root import Config


def check_world(config: Config, world_size: int, arguments: Sequence[str] = ("train", "CONFIG")) -> None:
    """Raises ConfigError, with the command to use, unless `world_size` processes are what the settings ask for.

    `arguments` are those of `slimpipe`, to complete the command.
    """
    parallel = config.parallel
    if world_size == parallel.world_size:
        return
    product = " x ".join(f"{axis} {size}" for axis in ("pp", "tp", "cp", "dp") if (size := getattr(parallel, axis)) > 1)
    need, have = (f"{count} process{'es' if count > 1 else ''}" for count in (parallel.world_size, world_size))
    command = f"torchrun --nproc-per-node {parallel.world_size} -m slimpipe {shlex.join(arguments)}"
    reason = f"{product or 'pp 1'} needs {need}, but here runs {have}; use: {command}"
    raise ConfigError([parallel.problem("pp", reason)])


def check_output(config: Config) -> None:
    """Raises ConfigError where `train.output` is no folder. One that already holds a run is where that run goes on."""
    output = Path(config.train.output)
    if output.exists() and not output.is_dir():
        raise ConfigError([config.train.problem("output", "is a file; choose a folder")])
