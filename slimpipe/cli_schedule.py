"""`slimpipe simulate | draw`: schedules on paper, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from slimpipe.cli_paper import PaperOptions
from slimpipe.config import ConfigError
from slimpipe.schedule import BUILT, draw_svg
from slimpipe.telling import told_in_one_line

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
KVSwapOption = Annotated[
    bool,
    typer.Option("--kv-swap", help="Keys and values in host memory, by layer, on every rank. Needs --hardware."),
]
CopyOption = Annotated[
    float | None,
    typer.Option(help="Copying a unit's activations one way, in average forwards of a unit. Default 1."),
]


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
    kv_swap: KVSwapOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    with_grid: Annotated[
        bool,
        typer.Option("--grid", help="Also the grid of ranks and ticks; vocabulary passes take a tick like all else."),
    ] = False,
) -> None:
    """Run a schedule on paper: bubble, memory and idle time. It is proved sound first."""
    with told_in_one_line():
        paper = PaperOptions(
            schedule,
            pp,
            slices,
            virtual_stages,
            microbatches,
            attention_share,
            backward_cost,
            vocab,
            head_share,
            exchange,
            hardware,
            model,
            sequence,
            swap,
            activation_budget,
            copy_cost,
            kv_swap,
        ).plan()
    report = paper.report()
    if as_json:
        if with_grid:
            report["grid"] = paper.grid().splitlines()
        typer.echo(json.dumps(report, indent=2))
        return
    _show(report)
    if with_grid:
        typer.echo(paper.grid(), nl=False)


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
    kv_swap: KVSwapOption = False,
    output: Annotated[Path, typer.Option("--output", "-o", help="The SVG file to write.")] = Path("schedule.svg"),
) -> None:
    """Draw a schedule's timeline as SVG."""
    with told_in_one_line():
        paper = PaperOptions(
            schedule,
            pp,
            slices,
            virtual_stages,
            microbatches,
            attention_share,
            backward_cost,
            vocab,
            head_share,
            exchange,
            hardware,
            model,
            sequence,
            swap,
            activation_budget,
            copy_cost,
            kv_swap,
        ).plan()
        try:
            output.write_text(draw_svg(paper.timeline), encoding="utf-8")
        except OSError as error:
            raise ConfigError([f"--output = {output}: cannot be written: {error.strerror}"]) from error
    typer.echo(f"wrote {output}")


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
    if report["kv_swap"]:
        gib = [f"{max(report[f'kv_{key}_bytes']) / 2**30:.2f}" for key in ("host", "out", "in")]
        whole.add_row("keys and values in host memory of a rank, GiB", gib[0], "")
        whole.add_row("out and in a step, GiB", f"{gib[1]}, {gib[2]}", "")
        whole.add_row("waits for keys and values, on one rank", f"{max(report['kv_waited']):.2f}", "")
    ranks = Table("rank", "idle", "peak units", "KV slots by chunk")
    rows = zip(report["idle"], report["peak_units"], report["kv_slots"], strict=True)
    for rank, (idle, units, slots) in enumerate(rows):
        ranks.add_row(str(rank), f"{idle:.2f}", str(units), " ".join(map(str, slots)))
    console = Console()
    console.print(whole, ranks)
