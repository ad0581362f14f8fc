"""`slimpipe calibrate` on the command line."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from slimpipe.config import load_config
from slimpipe.plan.hardware import HardwareProfile
from slimpipe.plan.hardware_file import load_hardware, write_hardware
from slimpipe.plan.rates import SizedRate
from slimpipe.schedule import Network, Rate
from slimpipe.telling import told_in_one_line

if TYPE_CHECKING:
    from slimpipe.calibrate.compute import Bench
    from slimpipe.config.sections import ModelConfig
    from slimpipe.runtime.carrier import Carrier

TOKENS: Final = "512,1024,2048,4096,8192,16384"


def calibrate(
    output: Annotated[Path, typer.Argument(help="The profile to write, a YAML file.")],
    model: Annotated[Path | None, typer.Option(help="Settings of the model to measure (default: Llama-8B's).")] = None,
    tokens: Annotated[str, typer.Option(help="Tokens of slices to measure.")] = TOKENS,
    past: Annotated[int, typer.Option(min=1, help="Tokens of the past that attention is measured with.")] = 32768,
    links: Annotated[Path | None, typer.Option(help="Profile whose links to take, where one process measures.")] = None,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    seconds: Annotated[float, typer.Option(help="Time a measurement.")] = 0.3,
) -> None:
    """Measures this machine and writes a hardware profile, for `simulate --hardware` and `pipeline.hardware`.

    Links need two processes or more, and those between nodes two nodes: torchrun --nproc-per-node 2 -m slimpipe
    calibrate profile.yaml. Measure while nothing else runs.
    """
    with told_in_one_line():
        sizes = _sizes(tokens)
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1 and links is None:
            raise ValueError(
                "--links: one process cannot measure links; start two with torchrun --nproc-per-node 2 -m slimpipe "
                "calibrate, or name a profile to take them from"
            )
        if seconds <= 0:
            raise ValueError(f"--seconds = {seconds}: must be above 0")
        known = None if links is None else load_hardware(links, "--links")
        if not output.parent.is_dir():
            raise ValueError(f"--output = {output}: {output.parent} is no folder; make it, or choose another path")
        shape = _model(model)
        _measure(output, shape, sizes, past, known, device, seconds, world)


def _sizes(text: str) -> list[int]:
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        sizes = []
    if not sizes or sizes[0] < 1:
        raise ValueError(f"--tokens = {text}: must be whole numbers above 0, with commas between")
    return sizes


def _model(path: Path | None) -> ModelConfig:
    from slimpipe.config.sections import ModelConfig

    if path is not None:
        return load_config(path).model
    return ModelConfig(layers=32, hidden_size=4096, heads=32, kv_heads=8, intermediate_size=14336, vocab_size=128256)


def _measure(
    output: Path,
    model: ModelConfig,
    sizes: list[int],
    past: int,
    known: HardwareProfile | None,
    device: str,
    seconds: float,
    world: int,
) -> None:
    import torch
    import torch.distributed as dist

    from slimpipe.calibrate.compute import Bench
    from slimpipe.parallel.mesh import pick_device
    from slimpipe.runtime.carrier import Carrier

    rank, local = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    where = pick_device(device, local, "--device")
    carrier = Carrier(where)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    bench = Bench(where, dtype, seconds)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    if world > 1:
        dist.init_process_group(carrier.backend, timeout=timedelta(minutes=30))
    try:
        network = _network(bench, carrier, rank, world, known)
        if rank == 0:
            say = Console(stderr=True)
            profile = _compute(bench, model, sizes, past, network, lambda line: say.print(line, highlight=False))
            comment = _comment(where, model, sizes, past, known is not None and world == 1)
            write_hardware(output, profile, "measured", comment)
            Console().print(shown(profile))
            typer.echo(f"written: {output}")
        if world > 1:
            dist.barrier()
    finally:
        if world > 1:
            dist.destroy_process_group()


def _network(bench: Bench, carrier: Carrier, rank: int, world: int, known: HardwareProfile | None) -> Network:
    """Measured between the first two ranks of a node, and the first ranks of the first two nodes; else `known`'s."""
    import torch

    from slimpipe.calibrate.links import link_rate

    a_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    found: dict[str, Rate | None] = {"inside": None, "between": None}
    for name, peer, there in (("inside", 1, a_node > 1), ("between", a_node, world > a_node)):
        if there:
            group = carrier.new_group([0, peer], name)
            if rank in (0, peer):
                found[name] = link_rate(bench, carrier, group, peer if rank == 0 else 0, first=rank == 0)
    inside, between = found["inside"], found["between"]
    if known is not None:
        inside, between = inside or known.network.inside, between or known.network.between
    # One rank a node has nobody inside of it: the link between nodes is all there is.
    inside = inside or between or Rate(0.0, 1.0)
    if world == 1 and known is not None:
        return Network(inside, between, known.network.ranks_per_node)
    return Network(inside, between, max(a_node, torch.cuda.device_count()))


def _compute(
    bench: Bench,
    model: ModelConfig,
    sizes: list[int],
    past: int,
    network: Network,
    say: Callable[[str], None],
) -> HardwareProfile:
    import torch

    from slimpipe.calibrate.compute import AttentionRates, attention_rates, gemm_rate, host_rate, memory_rate
    from slimpipe.kernels.attention import select_backend

    backend = select_backend("auto", bench.device, bench.dtype, deterministic=False)
    gemm, attention = {}, {}
    for tokens in sizes:
        say(f"{tokens} tokens")
        gemm[tokens] = gemm_rate(bench, model, tokens)
        attention[tokens] = attention_rates(bench, backend, model, tokens, past)

    def by_size(of: Callable[[AttentionRates], float]) -> SizedRate:
        return SizedRate.of({tokens: of(found) for tokens, found in attention.items()})

    name = torch.cuda.get_device_name(bench.device) if bench.device.type == "cuda" else f"CPU, {platform.machine()}"
    return HardwareProfile(
        name,
        network,
        SizedRate.of(gemm),
        by_size(lambda found: found.forward),
        by_size(lambda found: found.backward),
        by_size(lambda found: found.own_forward),
        by_size(lambda found: found.own_backward),
        memory_rate(bench),
        host_rate(bench),
    )


def _comment(device: object, model: ModelConfig, sizes: list[int], past: int, links_taken: bool) -> str:
    import torch

    on_gpu = torch.cuda.is_available() and getattr(device, "type", "") == "cuda"
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    if on_gpu:
        versions += f", cuDNN {torch.backends.cudnn.version()}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    return "\n".join(
        [
            f"Measured {datetime.now(timezone.utc).date().isoformat()}: {versions}.",
            f"slimpipe calibrate {shlex.join(sys.argv[2:])}"[:112],
            f"Layers of width {model.hidden_size}, {model.heads} heads, {model.kv_heads} of keys, of "
            f"{model.head_dim}; MLP {model.intermediate_size}. Attention over {past} tokens.",
            "Links: " + ("taken from another profile." if links_taken else "measured beside compute."),
        ]
    )


def shown(profile: HardwareProfile) -> Table:
    """Rates by tokens; links below."""
    table = Table(title=profile.name, title_justify="left")
    heads = ("tokens", "GEMM", "attention", "backward", "own slice", "backward")
    for head in heads:
        table.add_column(head, justify="right")
    rates = (profile.gemm, profile.forward, profile.backward, profile.own_forward, profile.own_backward)
    for tokens, _ in profile.gemm.points:
        table.add_row(str(tokens), *(f"{rate.at(tokens) / 1e12:.3g}" for rate in rates))
    links = {"inside": profile.network.inside, "between": profile.network.between, "host": profile.host}
    known = {name: rate for name, rate in links.items() if rate is not None}
    said = [f"{name} {rate.bandwidth / 1e9:.3g} GB/s, {rate.latency * 1e6:.3g} us" for name, rate in known.items()]
    if profile.memory is not None:
        said.append(f"memory {profile.memory / 1e9:.4g} GB/s")
    table.caption = "TFLOP/s. " + "; ".join(said)
    return table
