"""`slimpipe train | generate | convert | report | doctor | calibrate | plan | data | simulate | draw`.

What the user got wrong is told in one clear line on stderr, exit code 2, before any process group starts; under
torchrun by one process a node. torch is imported by the commands that need it: schedules are simulated and drawn
without it.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from slimpipe.calibrate.command import calibrate
from slimpipe.cli_data import data_app
from slimpipe.cli_plan import plan
from slimpipe.cli_schedule import draw, simulate
from slimpipe.config import ConfigError, check_output, check_world, job_size, load_config
from slimpipe.doctor.command import doctor
from slimpipe.telling import told_in_one_line

app = typer.Typer(
    help="Train language models on long contexts with a pipeline over slices of the sequence.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.add_typer(data_app, name="data")


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        typer.echo(f"slimpipe {version('slimpipe')}")
    except PackageNotFoundError:
        typer.echo("slimpipe (not installed: run from its source folder)")
    raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that stand before a command."""
    # As `python -m` does: a model of one's own lies in the folder that slimpipe is started from.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


@app.command()
def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file; docs/configuration.md has all keys.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Such as pipeline.slices=8 optim.lr=1e-4.")
    ] = None,
) -> None:
    """Train a model. With parallel.pp above 1: torchrun --nproc-per-node N -m slimpipe train CONFIG."""
    changes = overrides or []
    with told_in_one_line():
        settings = load_config(config, changes)
        check_world(settings, job_size(os.environ), ["train", str(config), *changes])
        check_output(settings)

    from slimpipe.data import DataError
    from slimpipe.train.checkpoint import CheckpointError
    from slimpipe.train.main import train as run
    from slimpipe.train.nonfinite import NonFinite

    with told_in_one_line(DataError, CheckpointError):
        try:
            run(settings)
        except NonFinite as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(1) from error


@app.command()
def generate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run (its train.output).")],
    prompt: Annotated[str, typer.Option(help="The text to complete.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to make at most.")] = 64,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=100.0, help="0 takes the likeliest token each time.")
    ] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Choose among so many tokens; 0: among all.")] = 40,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the choice.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Complete a prompt with a trained model."""
    from slimpipe.data import DataError
    from slimpipe.train.checkpoint import CheckpointError
    from slimpipe.train.generate import generate as complete

    with told_in_one_line(DataError, CheckpointError):
        typer.echo(complete(run, prompt, max_tokens, temperature, top_k, seed, device))


app.command()(doctor)
app.command()(calibrate)
app.command()(plan)


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs; several are laid over each other.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")] = Path("report.html"),
) -> None:
    """Loss, throughput, memory and idle share of runs as one HTML page that needs no network."""
    from slimpipe.report import ReportError, page, read_run

    with told_in_one_line(ReportError):
        text = page([read_run(run) for run in runs])
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError([f"--output = {output}: cannot be written: {error.strerror}"]) from error
    typer.echo(f"wrote {output}")


@app.command()
def convert(
    source: Annotated[
        Path,
        typer.Argument(metavar="SOURCE", help="A Hugging Face folder of a Llama, or a run's or checkpoint's folder."),
    ],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="The folder to write.")],
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16. Default: as they are, and of a run as it trains.")
    ] = None,
    shard_gb: Annotated[float, typer.Option(min=1e-6, help="Size of a safetensors file at most.")] = 5.0,
) -> None:
    """Convert weights: Hugging Face's files of a Llama into a checkpoint to start from, or a run into such files."""
    from slimpipe.train.checkpoint import CheckpointError
    from slimpipe.weights import WeightsError
    from slimpipe.weights import convert as run

    with told_in_one_line(WeightsError, CheckpointError):
        typer.echo(run(source, output, dtype, round(shard_gb * 1e9)))


app.command()(simulate)
app.command()(draw)
