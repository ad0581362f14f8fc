"""`slimpipe plan`: which slices, stages, recomputation, exchange and swap a run should have."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from slimpipe.config import Config, ConfigError, load_config
from slimpipe.plan.hardware_file import load_hardware
from slimpipe.telling import told_in_one_line

if TYPE_CHECKING:
    from slimpipe.train.search import Found, Search

GIB = 2**30
WIDTH = 120
"""Columns of the table where nobody says how many there are."""


def plan(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file; docs/configuration.md has all keys.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Such as data.sequence_length=131072.")
    ] = None,
    hardware: Annotated[
        Path | None,
        typer.Option(
            help="A profile: configs/hardware/h200.yaml, or what calibrate wrote. Default: pipeline.hardware."
        ),
    ] = None,
    gpu_memory: Annotated[float | None, typer.Option(help="GiB of one GPU. Default: this machine's.")] = None,
    keep: Annotated[list[str] | None, typer.Option(help="A key that stays as it is, such as memory.recompute.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Settings to show, the fastest first.")] = 10,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the settings with the fastest to this YAML file.")
    ] = None,
) -> None:
    """The fastest slices, virtual stages, recomputation, exchange and swap that fit, on paper. Needs no GPU."""
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    with told_in_one_line():
        search = _search(config, overrides or [], hardware, gpu_memory, keep or [])
        if output is not None and output.exists():
            raise ConfigError([f"--output = {output}: exists; name another file, or remove it"])
        if output is not None and not os.access(output.parent, os.W_OK):
            raise ConfigError([f"--output = {output}: {output.parent} is no folder that can be written to; make it"])
        shapes = search.shapes()
        if not shapes:
            raise ConfigError([_no_shape(search)])
        found = [
            one
            for shape in track(shapes, "trying shapes", console=Console(stderr=True), transient=True)
            for one in search.of_shape(*shape)
        ]
        if not found:
            raise ConfigError([_nothing_fits(search)])
    found.sort(key=lambda one: one.seconds)
    console.print(_table(found[:top], search))
    fastest = found[0]
    typer.echo(
        "On paper: without optimizer and launches; steps measured on H200s took 2 to 9 % longer (docs/measurements.md)."
    )
    typer.echo(f"The fastest: {' '.join(fastest.overrides)}")
    if output is not None:
        fastest.config.dump_yaml(output)
        typer.echo(f"wrote {output}")


def _search(
    path: Path, overrides: Sequence[str], hardware: Path | None, gpu_memory: float | None, keep: Sequence[str]
) -> Search:
    """Raises ConfigError, naming what is missing or unfit."""
    from slimpipe.train.search import KEYS, Search

    unknown = [key for key in keep if key not in KEYS]
    if unknown:
        raise ConfigError([f"--keep = {unknown[0]}: must be one of {', '.join(KEYS)}"])
    # Budgets say something with swaps alone, which are to be tried.
    given = _readable(path, overrides if "memory.swap" in keep else [*overrides, "memory.swap=auto"], keep)
    base = load_config(path, given)
    if base.pipeline.schedule != "slimpipe":
        raise ConfigError([f"pipeline.schedule = {base.pipeline.schedule}: plan searches settings of slimpipe's alone"])
    if base.pipeline.layers_per_stage is not None:
        raise ConfigError(["pipeline.layers_per_stage: plan tries equal stages alone; leave it out"])
    layers, p = base.model.layers, base.parallel.pp
    if layers % p:
        raise ConfigError([f"parallel.pp = {p}: {layers} layers cannot be cut into equal stages; use a divisor"])
    v = base.pipeline.virtual_stages
    if "pipeline.virtual_stages" in keep and layers % (p * v):
        raise ConfigError(
            [f"pipeline.virtual_stages = {v}: {layers} layers cannot be cut into {p * v} equal stages; use a divisor"]
        )
    profile = hardware if hardware is not None else base.pipeline.hardware
    if profile is None:
        raise ConfigError(
            ["--hardware: needed for rates; give configs/hardware/h200.yaml, or a file that slimpipe calibrate wrote"]
        )
    if gpu_memory is not None and not 0 < gpu_memory < float("inf"):
        raise ConfigError([f"--gpu-memory = {gpu_memory}: must be a number > 0, in GiB"])
    device_bytes = _memory_here() if gpu_memory is None else int(gpu_memory * GIB)
    if device_bytes is None:
        raise ConfigError(["--gpu-memory: needed where there is no GPU; give one's GiB, such as 140.4 for an H200"])

    def make(more: Sequence[str]) -> Config:
        return load_config(path, [*given, f"pipeline.hardware={json.dumps(str(profile))}", *more])

    named = "pipeline.hardware" if hardware is None else "--hardware"
    return Search(make, load_hardware(profile, named), device_bytes, keep)


def _readable(path: Path, overrides: Sequence[str], keep: Sequence[str]) -> list[str]:
    """The overrides; where the file's own values of what is searched do not fit, with others for these, since the
    search replaces them anyway. Raises ConfigError as `load_config` does where anything else is unfit too."""
    try:
        load_config(path, overrides)
    except ConfigError as error:
        for values in _instead(path, overrides):
            tried = [*overrides, *(f"{key}={value}" for key, value in values.items() if key not in keep)]
            with suppress(ConfigError):
                load_config(path, tried)
                return tried
        raise error
    return list(overrides)


def _instead(path: Path, overrides: Sequence[str]) -> Iterator[dict[str, str]]:
    """Values of what is searched that fit more settings than others: stages that are kept need a slice a rank, keys of
    the exchange need one."""
    from slimpipe.train.search import MOST_SLICES

    for exchange in ({}, {"pipeline.exchange": "balanced"}):
        plain = {"pipeline.slices": "1", "pipeline.virtual_stages": "1", "memory.recompute": "none", **exchange}
        yield plain
        with suppress(ConfigError):
            config = load_config(path, [*overrides, *(f"{key}={value}" for key, value in plain.items())])
            length, p = config.data.sequence_length, config.parallel.pp
            yield from (plain | {"pipeline.slices": str(n)} for n in range(p, MOST_SLICES * p + 1) if length % n == 0)


def _memory_here() -> int | None:
    import torch

    if not torch.cuda.is_available():
        return None
    total: int = torch.cuda.get_device_properties(0).total_memory
    return total


def _no_shape(search: Search) -> str:
    from slimpipe.train.search import MOST_UNITS

    config = search.base
    slices, stages = search.slices(), search.stages()
    if not slices:
        length, p = config.data.sequence_length, config.parallel.pp
        return (
            f"data.sequence_length = {length}: cannot be cut into {p} equal slices or more of a length that is worth "
            "trying; use a multiple of a power of two, or --keep pipeline.slices"
        )
    units = min(slices) * min(stages)
    fewer = max(1, MOST_UNITS // units) * config.train.global_batch // config.shape.m
    return (
        f"train.global_batch = {config.train.global_batch}: {config.shape.m} microbatches of {units} units or more a "
        f"rank make plans too long to try one by one; ask with {fewer}, whose steps idle a little more"
    )


def _nothing_fits(search: Search) -> str:
    least = search.least
    if least is None:
        return "nothing can be planned with what is kept; leave --keep out, or see what slimpipe train says"
    return (
        f"nothing fits: {' '.join(least.overrides)} needs the least, {least.gpu_bytes / GIB:.1f} GiB on a rank; raise "
        "parallel.pp, lower data.sequence_length, or set memory.kv_swap: on"
    )


def _table(found: Sequence[Found], search: Search) -> Table:
    from slimpipe.train.search import KEYS

    config = search.base
    length, m, p = config.data.sequence_length, config.shape.m, config.parallel.pp
    table = Table(title=f"{length:,} tokens, {m} microbatches, {p} ranks: a step on paper", box=box.SIMPLE)
    for head in ("slices", "tokens", "stages", "recompute", "exchange", "swap"):
        table.add_column(head, no_wrap=True)
    for head in ("s a step", "MFU", "idle", "GPU GiB", "host GiB"):
        table.add_column(head, justify="right", no_wrap=True)
    for one in found:
        n, v, exchange, recompute, swap = (override.split("=", 1)[1] for override in one.overrides[: len(KEYS)])
        table.add_row(
            n,
            f"{length // int(n):,}",
            v,
            recompute,
            exchange,
            swap,
            f"{one.seconds:.3f}",
            "-" if one.mfu is None else f"{one.mfu:.1%}",
            f"{one.idle:.1%}",
            f"{one.gpu_bytes / GIB:.1f}",
            f"{one.host_bytes / GIB:.1f}" if one.host_bytes else "-",
        )
    return table
