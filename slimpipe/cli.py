"""`slimpipe train | generate | convert | report | doctor | calibrate | data | simulate | draw`.

What the user got wrong is told in one clear line on stderr, exit code 2, before any process group starts; under
torchrun by one process a node. torch is imported by the commands that need it: schedules are simulated and drawn
without it.
"""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Final, cast

import typer
from rich.console import Console
from rich.table import Table

from slimpipe.calibrate.command import calibrate
from slimpipe.cli_data import data_app
from slimpipe.config import ConfigError, check_output, check_world, job_size, load_config
from slimpipe.doctor.command import doctor
from slimpipe.plan.exchange import ExchangeSetting
from slimpipe.plan.hardware_file import load_hardware
from slimpipe.plan.swap import Amount, SwapSetting, host_link, unit_bytes
from slimpipe.schedule import (
    BUILT,
    MODES,
    Costs,
    Exchange,
    Mode,
    Peaks,
    Plan,
    PlanError,
    Shape,
    Swap,
    Timeline,
    add_exchange,
    add_vocabulary,
    bubble_fraction,
    build,
    check,
    draw_svg,
    equal_costs,
    grid,
    output_layer_costs,
    peak_activation,
    place_layers,
    sliced_costs,
)
from slimpipe.schedule import simulate as run_on_paper
from slimpipe.telling import told_in_one_line as _told_in_one_line

app = typer.Typer(
    help="Train language models on long contexts with a pipeline over slices of the sequence.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.add_typer(data_app, name="data")

# Some 100,000 a second are built, proved and simulated.
_MOST_ACTIONS: Final = 3_000_000


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
    with _told_in_one_line():
        settings = load_config(config, changes)
        check_world(settings, job_size(os.environ), ["train", str(config), *changes])
        check_output(settings)

    from slimpipe.data import DataError
    from slimpipe.train.checkpoint import CheckpointError
    from slimpipe.train.main import train as run
    from slimpipe.train.nonfinite import NonFinite

    with _told_in_one_line(DataError, CheckpointError):
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

    with _told_in_one_line(DataError, CheckpointError):
        typer.echo(complete(run, prompt, max_tokens, temperature, top_k, seed, device))


app.command()(doctor)
app.command()(calibrate)


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs; several are laid over each other.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")] = Path("report.html"),
) -> None:
    """Loss, throughput, memory and idle share of runs as one HTML page that needs no network."""
    from slimpipe.report import ReportError, page, read_run

    with _told_in_one_line(ReportError):
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

    with _told_in_one_line(WeightsError, CheckpointError):
        typer.echo(run(source, output, dtype, round(shard_gb * 1e9)))


ScheduleOption = Annotated[str, typer.Option(help=f"One of {', '.join(BUILT)}.")]
RanksOption = Annotated[int, typer.Option(help="Pipeline ranks p.")]
SlicesOption = Annotated[int, typer.Option(help="Slices n a sequence.")]
StagesOption = Annotated[int, typer.Option(help="Model chunks v a rank.")]
MicrobatchesOption = Annotated[int, typer.Option(help="Microbatches m a step.")]
AttentionOption = Annotated[
    float | None, typer.Option(help="Attention's share of a forward, 0 to 1: later slices cost more.")
]
BackwardOption = Annotated[
    float | None, typer.Option(help="A backward's cost in forwards, all slices equal. Default 2.")
]
VocabOption = Annotated[
    str, typer.Option(help="The output layer: off (costs nothing), last (on the last rank), parallel (on all ranks).")
]
ExchangeOption = Annotated[
    str, typer.Option(help="Whether ranks share attention: off, pairwise or balanced. Needs --attention-share.")
]
HardwareOption = Annotated[
    Path | None,
    typer.Option(help="A profile such as configs/hardware/h200_facts.yaml: transfers then take time. Needs --model."),
]
ModelOption = Annotated[
    Path | None, typer.Option(help="A training configuration; its model and memory.recompute set sizes and rates.")
]
SequenceOption = Annotated[int | None, typer.Option(help="Tokens a sequence. Default: that of --model.")]
HeadOption = Annotated[
    float | None, typer.Option(help="The whole output layer's forward for a slice, in average forwards of a unit.")
]
SwapOption = Annotated[
    str, typer.Option(help="Activations in host memory: off, auto (the least that fits) or a share of them, 0 to 1.")
]
BudgetOption = Annotated[
    float | None,
    typer.Option(help="With --swap auto: what a rank may hold, in activations of one microbatch over all layers."),
]
CopyOption = Annotated[
    float | None,
    typer.Option(help="Copying a unit's activations one way, in average forwards of a unit. Default 1."),
]


@app.command()
def simulate(
    schedule: ScheduleOption = "slimpipe",
    pp: RanksOption = 4,
    slices: SlicesOption = 1,
    virtual_stages: StagesOption = 1,
    microbatches: MicrobatchesOption = 4,
    attention_share: AttentionOption = None,
    backward_cost: BackwardOption = None,
    vocab: VocabOption = "off",
    head_share: HeadOption = None,
    exchange: ExchangeOption = "off",
    hardware: HardwareOption = None,
    model: ModelOption = None,
    sequence: SequenceOption = None,
    swap: SwapOption = "off",
    activation_budget: BudgetOption = None,
    copy_cost: CopyOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    with_grid: Annotated[
        bool,
        typer.Option("--grid", help="Also the grid of ranks and ticks; vocabulary passes take a tick like all else."),
    ] = False,
) -> None:
    """Run a schedule on paper: bubble, memory and idle time. It is proved sound first."""
    with _told_in_one_line():
        shape = _shape(pp, virtual_stages, slices, microbatches)
        setting = _setting(shape, schedule, attention_share, exchange, hardware, model, sequence)
        costs = _costs(slices, attention_share, backward_cost)
        swaps = _swaps(shape, setting, swap, activation_budget, copy_cost, hardware, model, sequence)
        paper = _Paper.of(schedule, shape, costs, _Head.of(vocab, head_share), exchange, setting, swaps)
    report = paper.report()
    if as_json:
        if with_grid:
            report["grid"] = paper.grid().splitlines()
        typer.echo(json.dumps(report, indent=2))
        return
    _show(report)
    if with_grid:
        typer.echo(paper.grid(), nl=False)


@app.command()
def draw(
    schedule: ScheduleOption = "slimpipe",
    pp: RanksOption = 4,
    slices: SlicesOption = 1,
    virtual_stages: StagesOption = 1,
    microbatches: MicrobatchesOption = 4,
    attention_share: AttentionOption = None,
    backward_cost: BackwardOption = None,
    vocab: VocabOption = "off",
    head_share: HeadOption = None,
    exchange: ExchangeOption = "off",
    hardware: HardwareOption = None,
    model: ModelOption = None,
    sequence: SequenceOption = None,
    swap: SwapOption = "off",
    activation_budget: BudgetOption = None,
    copy_cost: CopyOption = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The SVG file to write.")] = Path("schedule.svg"),
) -> None:
    """Draw a schedule's timeline as SVG."""
    with _told_in_one_line():
        shape = _shape(pp, virtual_stages, slices, microbatches)
        setting = _setting(shape, schedule, attention_share, exchange, hardware, model, sequence)
        costs = _costs(slices, attention_share, backward_cost)
        swaps = _swaps(shape, setting, swap, activation_budget, copy_cost, hardware, model, sequence)
        paper = _Paper.of(schedule, shape, costs, _Head.of(vocab, head_share), exchange, setting, swaps)
        try:
            output.write_text(draw_svg(paper.timeline), encoding="utf-8")
        except OSError as error:
            raise ConfigError([f"--output = {output}: cannot be written: {error.strerror}"]) from error
    typer.echo(f"wrote {output}")


def _shape(pp: int, virtual_stages: int, slices: int, microbatches: int) -> Shape:
    options = {"pp": pp, "virtual-stages": virtual_stages, "slices": slices, "microbatches": microbatches}
    problems = [f"--{name} = {value}: must be a whole number > 0" for name, value in options.items() if value < 1]
    if problems:
        raise ConfigError(problems)
    return Shape(pp, virtual_stages, slices, microbatches)


def _costs(slices: int, attention_share: float | None, backward_cost: float | None) -> Costs:
    if attention_share is None:
        if backward_cost is not None and not 0 < backward_cost < float("inf"):
            raise ConfigError([f"--backward-cost = {backward_cost}: must be a number > 0"])
        return equal_costs(1.0, 2.0 if backward_cost is None else backward_cost)
    if backward_cost is not None:
        raise ConfigError([f"--backward-cost = {backward_cost}: --attention-share sets it; leave one of them out"])
    if not 0 <= attention_share <= 1:
        raise ConfigError([f"--attention-share = {attention_share}: must be a number >= 0 and <= 1"])
    return sliced_costs(slices, attention_share)


def _setting(
    shape: Shape,
    schedule: str,
    attention_share: float | None,
    exchange: str,
    hardware: Path | None,
    model: Path | None,
    sequence: int | None,
) -> ExchangeSetting | None:
    """What exchange has to work with; None where there is nothing to share, or nobody in phase to share it with."""
    if exchange not in MODES:
        raise ConfigError([f"--exchange = {exchange}: must be one of {', '.join(MODES)}"])
    if hardware is None:
        for name, value in (("model", model), ("sequence", sequence)):
            if value is not None:
                raise ConfigError([f"--{name} = {value}: says something with --hardware alone; leave it out"])
        if exchange != "off" and not attention_share:
            raise ConfigError([f"--exchange = {exchange}: needs --attention-share above 0, or --hardware and --model"])
    elif model is None:
        raise ConfigError([f"--hardware = {hardware}: needs --model, whose sizes it is applied to"])
    if schedule != "slimpipe":
        if exchange != "off" or hardware is not None:
            option = f"--exchange = {exchange}" if exchange != "off" else f"--hardware = {hardware}"
            raise ConfigError([f"{option}: needs --schedule slimpipe, whose ranks are in phase"])
        return None
    if hardware is None or model is None:
        return ExchangeSetting.on_paper(shape.n, attention_share) if attention_share and attention_share <= 1 else None
    settings = load_config(model)
    tokens = sequence or settings.data.sequence_length
    profile, recompute = load_hardware(hardware), settings.memory.recompute
    return ExchangeSetting.on_hardware(profile, settings.model, shape, tokens, attention_share, recompute)


def _swaps(
    shape: Shape,
    setting: ExchangeSetting | None,
    swap: str,
    budget: float | None,
    copy: float | None,
    hardware: Path | None,
    model: Path | None,
    sequence: int | None,
) -> SwapSetting | None:
    """What is to move; None where nothing is."""
    amount = _amount(swap)
    if amount == "off":
        for name, value in (("activation-budget", budget), ("copy-cost", copy)):
            if value is not None:
                raise ConfigError([f"--{name} = {value}: says something with --swap alone; leave it out"])
        return None
    if hardware is None or model is None:
        mean = 1.0 if setting is None else setting.work.mean_forward(shape.n)
        return SwapSetting.on_paper(amount, shape, mean * (1.0 if copy is None else copy), budget)
    if copy is not None:
        raise ConfigError([f"--copy-cost = {copy}: --hardware and --model set it; leave one of them out"])
    settings = load_config(model)
    tokens = (sequence or settings.data.sequence_length) // shape.n
    placement = place_layers(settings.model.layers, shape.stages)
    sizes = unit_bytes(settings.model, settings.memory.recompute, shape, placement, tokens, with_slots=True)
    return SwapSetting(amount, sizes, host_link(load_hardware(hardware))).within(shape, budget)


def _amount(swap: str) -> Amount:
    if swap in ("off", "auto"):
        return cast(Amount, swap)
    try:
        share = float(swap)
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise ConfigError([f"--swap = {swap}: must be off, auto or a number > 0 and <= 1"])
    return share


@dataclass(frozen=True)
class _Head:
    """Where the output layer is and what its forward takes for a slice."""

    vocab: str
    share: float | None

    @classmethod
    def of(cls, vocab: str, share: float | None) -> _Head:
        if vocab not in _VOCAB:
            raise ConfigError([f"--vocab = {vocab}: must be one of {', '.join(_VOCAB)}"])
        if vocab == "off" and share is not None:
            raise ConfigError([f"--head-share = {share}: --vocab = off costs nothing; use --vocab last or parallel"])
        if vocab != "off" and share is None:
            raise ConfigError([f"--vocab = {vocab}: needs --head-share, what the output layer costs"])
        if share is not None and not 0 <= share < float("inf"):
            raise ConfigError([f"--head-share = {share}: must be a number >= 0"])
        return cls(vocab, share)


_VOCAB: Final = ("off", "last", "parallel")


@dataclass(frozen=True)
class _Paper:
    """A schedule that was built, proved sound and run on paper."""

    plan: Plan
    head: _Head
    timeline: Timeline
    peaks: Peaks
    exchange: Exchange | None
    setting: ExchangeSetting | None
    kept: Timeline
    """Without swaps."""
    swap: Swap | None = None
    swaps: SwapSetting | None = None

    @classmethod
    def of(
        cls,
        name: str,
        shape: Shape,
        costs: Costs,
        head: _Head,
        mode: str = "off",
        setting: ExchangeSetting | None = None,
        swaps: SwapSetting | None = None,
    ) -> _Paper:
        """`setting`: of the exchange; with hardware its times replace `costs`."""
        actions = 2 * shape.p * shape.units
        if actions > _MOST_ACTIONS:
            raise PlanError(
                f"{actions:,} forwards and backwards: above {_MOST_ACTIONS:,} this would take minutes; use fewer "
                "ranks, virtual stages, slices or microbatches"
            )
        plan = build(name, shape)
        exchange = None
        if setting is not None:
            exchange = setting.exchange(plan, cast(Mode, mode))
            plan = add_exchange(plan, exchange)
            costs = setting.work.costs()
        if head.vocab == "parallel":
            slots = exchange.slots if exchange is not None and exchange.mode != "off" else None
            plan = add_vocabulary(plan, costs, slots)
        mean = 1.0 if setting is None else setting.work.mean_forward(shape.n)
        costs = replace(costs, vocabulary=output_layer_costs(mean * (head.share or 0.0), shape.p))
        link = setting.link if setting is not None else None

        def on_paper() -> Timeline:
            gatherings = setting.gatherings(exchange) if setting is not None and exchange is not None else None
            return run_on_paper(plan, costs, link, gatherings=gatherings, host=None if swaps is None else swaps.links())

        timeline, swap = on_paper(), None
        kept = timeline
        if swaps is not None:
            plan, swap = swaps.apply(plan, kept)
            timeline = on_paper()
        peaks = check(plan, exchange, swap=swap)
        if not math.isfinite(timeline.makespan):
            raise PlanError("the costs are too large to be added up; use smaller ones")
        return cls(plan, head, timeline, peaks, exchange, setting, kept, swap, swaps)

    def grid(self) -> str:
        # A pass is a small part of a forward: sampled by time it would hardly ever be seen.
        return grid(self.plan, exchange=self.exchange) if self.plan.has_vocabulary else grid(self.timeline)

    def report(self) -> dict[str, Any]:
        """What `--json` prints. Times in forwards of a unit, in seconds with --hardware; lists by rank, activations in
        those of one microbatch."""
        name, shape, timeline = self.plan.name, self.plan.shape, self.timeline
        return {
            "schedule": name,
            "pp": shape.p,
            "virtual_stages": shape.v,
            "slices": shape.n,
            "microbatches": shape.m,
            "vocab": self.head.vocab,
            "head_share": self.head.share,
            "bubble_fraction": timeline.bubble_fraction,
            "time_unit": "forwards" if self.setting is None or self.setting.link is None else "seconds",
            "makespan": timeline.makespan,
            "peak_units": list(timeline.peak_units),
            "peak_activation": timeline.peak_activation,
            "kv_slots": [list(chunks) for chunks in self.peaks.kv_slots],
            "logits_shards": list(self.peaks.logits),
            "idle": list(timeline.idle),
            "formula": {
                "bubble_fraction": float(bubble_fraction(name, shape)),
                "peak_activation": float(peak_activation(name, shape)),
            },
            **self._exchange(),
            **self._swap(),
        }

    def _swap(self) -> dict[str, Any]:
        if self.swaps is None or self.swap is None:
            return {"swap": "off"}
        return self.swaps.report(self.plan, self.swap, self.timeline, self.kept)

    def _exchange(self) -> dict[str, Any]:
        if self.setting is not None and self.exchange is not None:
            return self.setting.report(self.exchange)
        return {"exchange": "off", "exchange_bytes": [0.0] * self.plan.shape.p, "loans": 0}


def _show(report: dict[str, Any]) -> None:
    formula = report["formula"]
    title = "{schedule}: p {pp}, v {virtual_stages}, n {slices}, m {microbatches}".format(**report)
    if report["vocab"] != "off":
        title += ", output layer {vocab} at {head_share}".format(**report)
    whole = Table("", "simulated", "formula, equal costs", title=title, title_justify="left")
    whole.add_row("bubble", f"{report['bubble_fraction']:.2%}", f"{formula['bubble_fraction']:.2%}")
    whole.add_row("peak activation, in M_a", f"{report['peak_activation']:.4f}", f"{formula['peak_activation']:.4f}")
    whole.add_row(f"makespan, in {report['time_unit']}", f"{report['makespan']:.2f}", "")
    if report["exchange"] != "off":
        busiest = max(report["exchange_bytes"])
        bound = f"pairwise: {report['exchange_bytes_bound']:.2f}"
        whole.add_row(f"loans, {report['exchange']}", str(report["loans"]), "")
        whole.add_row("exchange, in L M_h a microbatch", f"{busiest:.2f}", bound)
        whole.add_row("longest rank over the best, in KV slices", f"{report['max_imbalance_kv_slices']:.2f}", "")
    if report["swap"] != "off":
        moved, device, host = (max(report[key]) for key in ("moved_share", "device_activation", "host_activation"))
        whole.add_row(f"swap, {report['swap']}: moved on one rank", f"{moved:.0%}", "")
        within = "" if report["swap_fits"] else ", above the budget"
        whole.add_row("on a device, in M_a", f"{device:.4f}{within}", "")
        whole.add_row("in host memory of a rank, in M_a", f"{host:.4f}", "")
        whole.add_row("waits for copies, on one rank", f"{max(report['swap_waited']):.2f}", "")
        whole.add_row("makespan without swap", f"{report['makespan_without_swap']:.2f}", "")
    ranks = Table("rank", "idle", "peak units", "KV slots by chunk")
    rows = zip(report["idle"], report["peak_units"], report["kv_slots"], strict=True)
    for rank, (idle, units, slots) in enumerate(rows):
        ranks.add_row(str(rank), f"{idle:.2f}", str(units), " ".join(map(str, slots)))
    console = Console()
    console.print(whole, ranks)
