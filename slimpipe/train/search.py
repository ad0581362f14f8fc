"""The search for a configuration (`slimpipe plan`): settings that fit into memory, by their step on paper.

Slices, virtual stages, recomputation, exchange and swap are tried together; model, sequence, batch and ranks are given.
Each candidate is the plan that a run would make, proven sound, with the run's own forecast of memory; its step is
simulated at a hardware profile's rates (`slimpipe.plan.predict`), without optimizer and launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, get_args

import torch

from slimpipe.config import ConfigError, Recompute
from slimpipe.plan.flops import step_flops
from slimpipe.plan.hardware import HardwareProfile
from slimpipe.plan.peaks import peak_tflops
from slimpipe.plan.predict import predict
from slimpipe.plan.swap import host_link
from slimpipe.schedule import PlanError
from slimpipe.train.forecast import ROOM, Forecast
from slimpipe.train.planning import Planned, make_plan
from slimpipe.train.swapping import plan_swaps

if TYPE_CHECKING:
    from slimpipe.config import Config

KEYS: Final = (
    "pipeline.slices",
    "pipeline.virtual_stages",
    "pipeline.exchange",
    "memory.recompute",
    "memory.swap",
)
"""What is searched."""
Values = tuple[int, int, str, str, str]
"""Of KEYS, in their order."""
SHORTEST: Final = 1024
"""Tokens of the shortest slices that are tried, but for two a rank."""
MOST_SLICES: Final = 16
"""For each rank. The fewest are one for each: fewer leave a pipeline's activations whole."""
MOST_STAGES: Final = 8
MOST_UNITS: Final = 1024
"""Of a rank in a step: more make a plan that takes many seconds."""


@dataclass(frozen=True)
class Found:
    """Settings that fit. `seconds`: a step on paper; `idle`: share of it, mean of the ranks; bytes: of the fullest
    rank; `waits`: seconds that compute waits for swaps."""

    overrides: tuple[str, ...]
    """Those of KEYS, in their order, and what they take back."""
    config: Config
    seconds: float
    idle: float
    mfu: float | None
    gpu_bytes: int
    host_bytes: int
    waits: float


@dataclass(frozen=True)
class Least:
    """The settings that would need the least memory, where none fits."""

    overrides: tuple[str, ...]
    gpu_bytes: int


class Search:
    """`make`: the run's settings under overrides such as `pipeline.slices=8`. `device_bytes`: of one GPU's memory.
    `keep`: those of KEYS that stay as they are."""

    def __init__(
        self,
        make: Callable[[Sequence[str]], Config],
        hardware: HardwareProfile,
        device_bytes: int,
        keep: Sequence[str] = (),
    ) -> None:
        self._make, self._hardware, self._device_bytes, self._keep = make, hardware, device_bytes, set(keep)
        self.base = make(())
        self.least: Least | None = None
        self._plain: dict[tuple[int, int], Planned | None] = {}

    def shapes(self) -> list[tuple[int, int]]:
        """(slices, virtual stages) to try."""
        m = self.base.shape.m
        return [(n, v) for n in self.slices() for v in self.stages() if n * v * m <= MOST_UNITS]

    def slices(self) -> list[int]:
        """Numbers of slices to try, whatever the microbatches."""
        if "pipeline.slices" in self._keep:
            return [self.base.pipeline.slices]
        length, p = self.base.data.sequence_length, self.base.parallel.pp
        found = [n for n in range(p, MOST_SLICES * p + 1) if length % n == 0]
        return [n for n in found if length // n >= SHORTEST or n <= 2 * p]

    def stages(self) -> list[int]:
        """Numbers of virtual stages to try, likewise."""
        if "pipeline.virtual_stages" in self._keep:
            return [self.base.pipeline.virtual_stages]
        layers, p = self.base.model.layers, self.base.parallel.pp
        return [v for v in range(1, MOST_STAGES + 1) if layers % (p * v) == 0]

    def of_shape(self, slices: int, stages: int) -> Iterator[Found]:
        """The settings of one shape that may be the fastest: from nothing recomputed on, to the first mode that fits
        with its exchange and waits for no copies, for what a mode makes again is time."""
        for mode in self._values("memory.recompute", get_args(Recompute)):
            for found, exchanged in self._that_fit(slices, stages, mode):
                yield found
                if exchanged and found.waits <= 1e-3 * found.seconds:
                    return

    def _values(self, key: str, values: Sequence[str]) -> Sequence[str]:
        section, name = key.split(".")
        return [getattr(getattr(self.base, section), name)] if key in self._keep else values

    def _that_fit(self, slices: int, stages: int, mode: str) -> Iterator[tuple[Found, bool]]:
        """Without swap, if need be without exchange, whose buffers take memory; unless it fits with exchange, with swap
        too. (settings, whether they have the exchange that there is to try)."""
        exchanges = self._values("pipeline.exchange", ("balanced", "off") if self.base.parallel.pp > 1 else ("off",))
        for swap in self._values("memory.swap", ("off", "auto")):
            if swap == "off" and not self._may_fit(slices, stages, mode):
                continue
            for exchange in exchanges if swap == "off" else exchanges[:1]:
                found = self._try((slices, stages, exchange, mode, swap))
                if found is not None:
                    yield found, exchange == exchanges[0]
                    if exchange == exchanges[0]:
                        return
                    break

    def _may_fit(self, slices: int, stages: int, mode: str) -> bool:
        """Whether there would be room without exchange and swap. Its plan is made once a shape: a mode changes little
        in it, and nothing in what it holds."""
        overrides = self._overrides((slices, stages, "off", mode, "off"))
        try:
            config = self._make(overrides)
            if (slices, stages) not in self._plain:
                self._plain[slices, stages] = make_plan(config)
        except (ConfigError, PlanError):
            self._plain[slices, stages] = None
        planned = self._plain[slices, stages]
        return planned is not None and self._bytes(config, planned, overrides) <= (1 - ROOM) * self._device_bytes

    def _bytes(self, config: Config, planned: Planned, overrides: tuple[str, ...]) -> int:
        """Of the fullest rank."""
        device = torch.device("cuda", 0)
        most = max(memory.total for memory in Forecast(config, planned, device, self._device_bytes).memory)
        if self.least is None or most < self.least.gpu_bytes:
            self.least = Least(overrides, most)
        return most

    def _try(self, values: Values) -> Found | None:
        """None where the settings do not go together, or do not fit."""
        device, overrides = torch.device("cuda", 0), self._overrides(values)
        try:
            config = self._make(overrides)
            planned = plan_swaps(config, make_plan(config), device, assumed_bytes=self._device_bytes)
        except (ConfigError, PlanError):
            return None
        if planned.exchange is None and "pipeline.exchange" not in self._keep:
            # No loans pay: the same plan, and the settings say so.
            overrides = self._overrides((*values[:2], "off", *values[3:]))
            config = self._make(overrides)
        most = self._bytes(config, planned, overrides)
        if most > (1 - ROOM) * self._device_bytes:
            return None
        links = planned.host_links(host_link(self._hardware))
        timeline = predict(config, planned.plan, planned.exchange, self._hardware, links)
        return Found(
            overrides,
            config,
            timeline.makespan,
            timeline.bubble_fraction,
            self._mfu(config, timeline.makespan),
            most,
            max(map(planned.host_bytes, range(config.shape.p))),
            max((*planned.swap_waits, *planned.kv_waits, 0.0)),
        )

    def _mfu(self, config: Config, seconds: float) -> float | None:
        peak = peak_tflops(self._hardware.name, config.train.dtype)
        if peak is None:
            return None
        flops = step_flops(config.model, config.data.sequence_length, config.train.global_batch)
        return flops / seconds / (config.parallel.world_size * peak * 1e12)

    def _overrides(self, values: Values) -> tuple[str, ...]:
        """First those of KEYS, then what takes back keys of the run's that say nothing beside these and are refused."""
        _, _, exchange, _, swap = values
        pipeline, memory = self.base.pipeline, self.base.memory
        idle = []
        if exchange == "off" and pipeline.exchange_granule is not None:
            idle.append("pipeline.exchange_granule=null")
        if exchange == "off" and pipeline.exchange_keep != "none":
            idle.append("pipeline.exchange_keep=none")
        if swap == "off" and memory.kv_swap != "on" and memory.host_budget_gib is not None:
            idle.append("memory.host_budget_gib=null")
        return (*(f"{key}={value}" for key, value in zip(KEYS, values, strict=True)), *idle)
