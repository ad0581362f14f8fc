"""Checks of the settings against where they run, made before any process group starts."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from slimpipe.config.errors import ConfigError
from slimpipe.config.root import Config
from slimpipe.config.yaml_text import shown


def job_size(environment: Mapping[str, str]) -> int:
    """Processes of the job that torchrun describes in `environment`; 1 where it describes none.

    Raises ConfigError for a variable that is not what torchrun would have set.
    """
    values = {"WORLD_SIZE": 1, "RANK": 0, "LOCAL_RANK": 0}
    problems = []
    for name in values:
        text = environment.get(name)
        if text is not None and not text.isdecimal():
            problems.append(f"{name} = {shown(text)}: must be a whole number; unset it, or start with torchrun")
        elif text is not None:
            values[name] = int(text)
    if not problems and values["RANK"] >= values["WORLD_SIZE"]:
        problems = [f"RANK = {values['RANK']}: must be below WORLD_SIZE ({values['WORLD_SIZE']}); start with torchrun"]
    if problems:
        raise ConfigError(problems)
    return values["WORLD_SIZE"]


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
