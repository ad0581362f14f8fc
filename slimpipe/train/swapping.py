"""From `memory.swap` to a plan with its swaps: what may be held, what that leaves to move, and when (DESIGN section 7).

Every rank makes the same plan, where devices have equal memory; where they have not, each keeps to its own: swaps bind
no ranks together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from slimpipe.config import ConfigError
from slimpipe.plan.flops import layer_flops_per_token
from slimpipe.plan.hardware import HardwareProfile
from slimpipe.plan.hardware_file import load_hardware
from slimpipe.plan.predict import predict
from slimpipe.plan.swap import DEFAULT_FLOPS, MIN_BYTES, SwapSetting, host_link, unit_bytes
from slimpipe.runtime.clock import Clock
from slimpipe.runtime.engine import Engine
from slimpipe.runtime.stage import Stage
from slimpipe.runtime.swap_memory import HostMemoryError, host_need, pin
from slimpipe.schedule import HostLinks, Timeline, check, exchange_refusal, most_held
from slimpipe.swap import UnitSwaps
from slimpipe.swap.streams import Streams, make_streams
from slimpipe.swap.units import ARENA_BYTES
from slimpipe.train.dtypes import DTYPES
from slimpipe.train.forecast import Forecast
from slimpipe.train.planning import Planned, by_operations

if TYPE_CHECKING:
    from slimpipe.config import Config

MARGIN: Final = 0.1
"""Of a GPU's memory: its context, NCCL's buffers, what the allocator cannot use, and what the forecast is off by."""
GIB: Final = 2**30


def least_bytes(device: torch.device) -> int:
    """Tensors of fewer bytes stay. A simulated device has none that are too small."""
    return MIN_BYTES if device.type == "cuda" else 1


def plan_swaps(
    config: Config,
    planned: Planned,
    device: torch.device,
    progress: Callable[[str], None] = lambda what: None,
    assumed_bytes: int | None = None,
) -> Planned:
    """What `make_plan` gave, with the swaps that the settings ask for; proved. `assumed_bytes`: as `Forecast` has it.

    Raises ConfigError, naming the key, where what cannot move is above the GPU budget that is set, or the host budget
    does not suffice. A GPU that is too small for what `auto` leaves is the forecast's to tell.
    """
    amount = config.memory.swap
    if amount == "off":
        return planned
    progress("placing the swaps")
    forecast = Forecast(config, planned, device, assumed_bytes)
    sizes = unit_bytes(
        config.model,
        config.memory.recompute,
        config.shape,
        forecast.placement,
        config.data.sequence_length // config.shape.n,
        config.train.micro_batch,
        DTYPES[config.train.dtype].itemsize,
        least_bytes(device),
    )
    profile = None if config.pipeline.hardware is None else load_hardware(config.pipeline.hardware)
    budget = _budget(config, forecast) if amount == "auto" else None
    setting = SwapSetting(amount, sizes, host_link(profile), budget)
    if amount == "auto" and budget is None:
        return planned
    plan, swap = setting.apply(planned.plan, in_seconds(config, planned, profile))
    assert swap is not None
    _refuse_host_budget(config, setting, replace(planned, plan=plan))
    progress("checking the swaps")
    check(plan, planned.exchange, swap=swap)
    found = replace(planned, plan=plan, swap=swap)
    waits = in_seconds(config, found, profile, setting.links()).swap_waited
    return replace(found, swap_waits=waits)


def _budget(config: Config, forecast: Forecast) -> tuple[float, ...] | None:
    """What units in flight may hold, by rank: the budget less what stays in any case. None: there is no budget."""
    asked = config.memory.gpu_budget_gib
    if asked is None and forecast.device_bytes is None:
        return None
    whole = asked * GIB if asked is not None else (1 - MARGIN) * (forecast.device_bytes or 0)
    stays = [footprint.total - footprint.terms["activations"] for footprint in forecast.memory]
    rank = max(range(len(stays)), key=lambda rank: stays[rank])
    if asked is not None and stays[rank] >= whole:
        problem = (
            f"memory.gpu_budget_gib = {asked}: on rank {rank} weights, gradients, optimizer, keys and values and all "
            f"else that cannot move take {stays[rank] / GIB:.3g} GiB; set it above that, or raise parallel.pp"
        )
        raise ConfigError([problem])
    return tuple(max(0.0, whole - bytes) for bytes in stays)


def _refuse_host_budget(config: Config, setting: SwapSetting, planned: Planned) -> None:
    budget = config.memory.host_budget_gib
    if budget is None:
        return
    sizes = setting.sizes
    for rank, actions in enumerate(planned.plan.ranks):
        need = most_held(actions, sizes.held[rank], sizes.movable[rank]).host
        if need > budget * GIB:
            problem = (
                f"memory.host_budget_gib = {budget}: rank {rank} needs {need / GIB:.3g} GiB of host memory for "
                f"memory.swap = {config.memory.swap}; raise it, or move less (a smaller share, or more "
                "memory.recompute)"
            )
            raise ConfigError([problem])


def in_seconds(
    config: Config, planned: Planned, profile: HardwareProfile | None, host: HostLinks | None = None
) -> Timeline:
    """The step on paper. By the profile's rates, if there is one and stages are equal; else by operations, at one rate.

    `host`: what swaps take, in seconds; None: nothing.
    """
    model, shape = config.model, config.shape
    stages = Forecast(config, planned, torch.device("cpu")).placement
    if profile is not None and exchange_refusal(stages) is None:
        return predict(config, planned.plan, planned.exchange, profile, host)
    tokens = config.train.micro_batch * config.data.sequence_length // shape.n
    unit = tokens * model.layers / shape.stages * sum(layer_flops_per_token(model, config.data.sequence_length))
    return by_operations(
        config, planned, host, unit / (profile.gemm.at(tokens) if profile is not None else DEFAULT_FLOPS)
    )


def make_swaps(
    config: Config,
    stages: Sequence[Stage],
    weights: Sequence[Tensor],
    device: torch.device,
    clock: Clock,
    streams: Streams | None,
) -> UnitSwaps:
    """Of one rank. `weights`: what stays beside the stages' parameters. No host memory is taken yet."""
    modules = [part for stage in stages for part in (stage.embedding, *stage.blocks, stage.head) if part is not None]
    budget = config.memory.host_budget_gib
    return UnitSwaps(
        streams or make_streams(device),
        modules,
        weights,
        least_bytes(device),
        None if budget is None else int(budget * GIB),
        lambda inward: clock.waiting("R" if inward else "V"),
        ARENA_BYTES if device.type == "cuda" else 1 << 20,
    )


def pin_host_memory(
    config: Config, engine: Engine, rank: int, device: torch.device, together: Callable[[int], float]
) -> tuple[int, ...]:
    """Takes the host memory that the swaps need. Bytes of a unit of each chunk that can go there, measured.

    `together(nbytes)`: what all ranks of this machine need, of which this one needs `nbytes`; collective: all ranks
    have looked at what there is before the first takes its own. Raises ValueError, naming the key, where it is not to
    be had.
    """
    dtype = DTYPES[config.train.dtype]
    need = host_need(engine, config.train.micro_batch, config.model.hidden_size, dtype, device)
    try:
        pin(engine, need, together(need.peak))
    except HostMemoryError as error:
        raise ValueError(
            f"memory.swap = {config.memory.swap}, rank {rank}: {error}; move less (a smaller share, a larger "
            "memory.gpu_budget_gib, or more recomputation by memory.recompute), or give the run more host memory "
            "(memory.host_budget_gib, the container's limit, ulimit -l)"
        ) from error
    return need.unit_bytes
