"""From `memory.swap` to a plan with its swaps: what may be held, what that leaves to move, and when
(docs/pipeline_swap.md).

Every rank makes the same plan, where devices have equal memory; where they have not, each keeps to its own: swaps bind
no ranks together. What is collective beside them goes by `Moving`, on which all agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from slimpipe.config import ConfigError
from slimpipe.plan.flops import layer_flops_per_token
from slimpipe.plan.footprint import Footprint
from slimpipe.plan.hardware import HardwareProfile
from slimpipe.plan.hardware_file import load_hardware
from slimpipe.plan.predict import predict
from slimpipe.plan.swap import DEFAULT_FLOPS, MIN_BYTES, SwapSetting, host_link, key_stream, unit_bytes
from slimpipe.runtime.clock import Clock
from slimpipe.runtime.engine import Engine
from slimpipe.runtime.kv_streaming import KVHostMemoryError, SlotStreams
from slimpipe.runtime.stage import Stage
from slimpipe.runtime.swap_memory import HostMemoryError, host_need, pin
from slimpipe.schedule import HostLinks, KVStream, Timeline, check, collector_paused, exchange_refusal
from slimpipe.swap import UnitSwaps
from slimpipe.swap.host_memory import available
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


@collector_paused()
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
    memory = config.memory
    if memory.swap == "off" and memory.kv_swap != "on":
        return planned
    progress("placing the swaps")
    profile = None if config.pipeline.hardware is None else load_hardware(config.pipeline.hardware)
    if memory.kv_swap == "on":
        planned = replace(planned, kv=kv_stream(config, planned, (True,) * config.shape.p))
    found = _swapped(config, planned, device, assumed_bytes, profile)
    if memory.swap == memory.kv_swap == "auto" and found.swap is not None:
        over = _over_budget(config, found, device, assumed_bytes)
        if any(over):
            streamed = replace(planned, kv=kv_stream(config, planned, over))
            found = _swapped(config, streamed, device, assumed_bytes, profile)
    if not found.moves:
        return planned
    _refuse_budgets(config, found, Forecast(config, found, device, assumed_bytes))
    progress("checking the swaps")
    check(found.plan, found.exchange, swap=found.swap)
    timeline = in_seconds(config, found, profile, found.host_links(host_link(profile)))
    return replace(found, swap_waits=timeline.swap_waited, kv_waits=timeline.keys_waited)


def _swapped(
    config: Config,
    planned: Planned,
    device: torch.device,
    assumed_bytes: int | None,
    profile: HardwareProfile | None,
) -> Planned:
    """With the units that `memory.swap` moves, where it moves any."""
    amount = config.memory.swap
    forecast = Forecast(config, planned, device, assumed_bytes)
    budget = _budget(config, forecast) if amount == "auto" else None
    if amount == "off" or (amount == "auto" and budget is None):
        return planned
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
    rate = host_link(profile)
    timeline = in_seconds(config, planned, profile, planned.host_links(rate))
    plan, swap = SwapSetting(amount, sizes, rate, budget).apply(planned.plan, timeline)
    return replace(planned, plan=plan, swap=swap)


def kv_stream(config: Config, planned: Planned, ranks: Sequence[bool]) -> KVStream | None:
    """Keys and values in host memory on these ranks; None where on none."""
    placement = Forecast(config, planned, torch.device("cpu")).placement
    tokens = config.train.micro_batch * config.data.sequence_length // config.shape.n
    element = DTYPES[config.train.dtype].itemsize
    return key_stream(config.model, config.shape, placement, tokens, ranks, element) if any(ranks) else None


def _over_budget(config: Config, planned: Planned, device: torch.device, assumed_bytes: int | None) -> tuple[bool, ...]:
    """Ranks that moving activations does not bring within the budget, and that have more layers than room for."""
    swap = planned.swap
    plain = Forecast(config, planned, device, assumed_bytes)
    budget = _budget(config, plain)
    assert swap is not None and budget is not None
    everywhere = kv_stream(config, planned, (True,) * config.shape.p)
    streamed = Forecast(config, replace(planned, kv=everywhere), device, assumed_bytes)
    return tuple(
        (swap.budget[rank] > swap.wanted[rank] or budget[rank] <= 0)
        and streamed.memory[rank].total < plain.memory[rank].total
        for rank in range(config.shape.p)
    )


def _stays(footprint: Footprint) -> int:
    return footprint.total - footprint.terms["activations"]


def _budget(config: Config, forecast: Forecast) -> tuple[float, ...] | None:
    """What units in flight may hold, by rank: the budget less what stays in any case. None: there is no budget."""
    asked = config.memory.gpu_budget_gib
    if asked is None and forecast.device_bytes is None:
        return None
    whole = asked * GIB if asked is not None else (1 - MARGIN) * (forecast.device_bytes or 0)
    return tuple(max(0.0, whole - _stays(footprint)) for footprint in forecast.memory)


def _refuse_budgets(config: Config, planned: Planned, forecast: Forecast) -> None:
    """Those that cannot be kept."""
    asked, budget = config.memory.gpu_budget_gib, config.memory.host_budget_gib
    stays = [_stays(footprint) for footprint in forecast.memory]
    fullest = max(range(len(stays)), key=lambda rank: stays[rank])
    if asked is not None and stays[fullest] >= asked * GIB:
        problem = (
            f"memory.gpu_budget_gib = {asked}: on rank {fullest} weights, gradients, optimizer, keys and values and "
            f"all else that cannot move take {stays[fullest] / GIB:.3g} GiB; set it above that, or raise parallel.pp"
        )
        raise ConfigError([problem])
    for rank in range(config.shape.p):
        need = planned.host_bytes(rank)
        if budget is not None and need > budget * GIB:
            keys, units = planned.kv_bytes(rank), config.memory.swap
            settings = [f"memory.swap = {units}"] if need > keys else []
            settings += [f"memory.kv_swap = {config.memory.kv_swap}"] if keys else []
            ways = ["move less (a smaller share, or more memory.recompute)"] if need > keys else []
            ways += ["set memory.kv_swap: off"] if keys else []
            problem = (
                f"memory.host_budget_gib = {budget}: rank {rank} needs {need / GIB:.3g} GiB of host memory for "
                f"{' and '.join(settings)}; raise it, or {', or '.join(ways)}"
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


class Moving(NamedTuple):
    """Whether activations, and whether keys and values, may go to the host by any rank's plan: the same on all."""

    units: bool
    keys: bool


def moving_anywhere(
    config: Config, planned: Planned, memory: torch.device, gather: Callable[[Tensor], Tensor]
) -> Moving:
    """Of all ranks' plans, of which this one's is `planned`. Collective where the settings ask for swaps at all.

    `gather`: every rank's row, from and to `memory`."""
    if config.memory.swap == "off" and config.memory.kv_swap != "on":
        return Moving(False, False)
    row = torch.tensor([planned.swap is not None, planned.kv is not None], dtype=torch.float64, device=memory)
    units, keys = gather(row).amax(0).tolist()
    return Moving(bool(units), bool(keys))


def make_swaps(
    config: Config,
    planned: Planned,
    rank: int,
    stages: Sequence[Stage],
    weights: Sequence[Tensor],
    device: torch.device,
    clock: Clock,
    streams: Streams | None,
) -> UnitSwaps | None:
    """Of one rank; None where no unit of it moves. `weights`: what stays beside the stages' parameters. No host memory
    is taken yet."""
    if planned.swap is None or not planned.swap.trips[rank]:
        return None
    modules = [part for stage in stages for part in (stage.embedding, *stage.blocks, stage.head) if part is not None]
    return UnitSwaps(
        streams or make_streams(device),
        modules,
        weights,
        least_bytes(device),
        _host_budget(config),
        lambda inward: clock.waiting("R" if inward else "V"),
        _arena_bytes(device),
    )


def make_slot_streams(
    config: Config, planned: Planned, rank: int, device: torch.device, clock: Clock, streams: Streams | None
) -> SlotStreams | None:
    """Of one rank; None where its keys and values stay. On streams of its own: the next layer's keys do not wait behind
    a whole unit."""
    if planned.kv is None or not planned.kv.ranks[rank]:
        return None
    return SlotStreams(
        streams or make_streams(device),
        max(planned.peaks.kv_slots[rank]),
        _host_budget(config),
        lambda: clock.waiting("KV"),
        _arena_bytes(device),
    )


def _host_budget(config: Config) -> int | None:
    """In bytes."""
    budget = config.memory.host_budget_gib
    return None if budget is None else int(budget * GIB)


def _arena_bytes(device: torch.device) -> int:
    return ARENA_BYTES if device.type == "cuda" else 1 << 20


@contextmanager
def pinning_slots(
    config: Config, planned: Planned, rank: int, device: torch.device, together: Callable[[int], float]
) -> Iterator[None]:
    """Around the warm-up, which takes the host memory of keys and values that stream. Collective, with `together` as
    for `pin_host_memory`; raises ValueError where it is not to be had."""
    need = planned.kv_bytes(rank)
    had, wanted = available() if device.type == "cuda" else None, together(need)
    try:
        if had is not None and wanted > had:
            raise KVHostMemoryError(
                f"{need / GIB:.1f} GiB of pinned host memory are needed, {wanted / GIB:.1f} GiB by all ranks of this "
                f"machine, which has {had / GIB:.1f} GiB available"
            )
        yield
    except KVHostMemoryError as error:
        raise ValueError(
            f"memory.kv_swap = {config.memory.kv_swap}, rank {rank}: {error}; set it to off, raise parallel.pp, or "
            "give the run more host memory (memory.host_budget_gib, the container's limit, ulimit -l)"
        ) from error
    together(0)  # all have theirs before anyone looks at what is left


def pin_host_memory(
    config: Config, engine: Engine, rank: int, device: torch.device, together: Callable[[int], float]
) -> tuple[int, ...]:
    """Takes the host memory that the swaps need. Bytes of a unit of each chunk that can go there, measured.

    `together(nbytes)`: what all ranks of this machine need, of which this one needs `nbytes`; collective: all ranks
    have looked at what there is before the first takes its own. Raises ValueError, naming the key, where it is not to
    be had.
    """
    if engine.swaps is not None and engine.slot_streams is not None:
        # One budget for both: keys and values have theirs.
        engine.swaps.arenas.budget -= engine.slot_streams.arenas.pinned
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
