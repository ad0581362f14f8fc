"""A schedule on paper: built with all its passes, proved sound, run through the simulator, and reported."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from slimpipe.plan.exchange import ExchangeSetting
from slimpipe.plan.swap import KeysSetting, SwapSetting
from slimpipe.schedule import (
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
    collector_paused,
    grid,
    output_layer_costs,
    peak_activation,
    simulate,
)

_MOST_ACTIONS: Final = 3_000_000  # some 100,000 a second are built, proved and simulated

Vocab = Literal["off", "last", "parallel"]
"""Where the output layer is: nowhere, so that it costs nothing; on the last rank; on all ranks."""


@dataclass(frozen=True)
class Head:
    """`share`: what the output layer's forward takes for a slice, in average forwards of a unit."""

    vocab: Vocab
    share: float | None = None


@dataclass(frozen=True)
class PaperPlan:
    """A schedule that was built, proved sound and run on paper."""

    plan: Plan
    head: Head
    timeline: Timeline
    peaks: Peaks
    exchange: Exchange | None
    setting: ExchangeSetting | None
    kept: Timeline
    """Without swaps."""
    swap: Swap | None = None
    swaps: SwapSetting | None = None
    keys: KeysSetting | None = None

    @classmethod
    @collector_paused()
    def of(
        cls,
        name: str,
        shape: Shape,
        costs: Costs,
        head: Head,
        mode: Mode = "off",
        setting: ExchangeSetting | None = None,
        swaps: SwapSetting | None = None,
        keys: KeysSetting | None = None,
    ) -> PaperPlan:
        """`setting`: of the exchange; with hardware its times replace `costs`. Raises PlanError."""
        actions = 2 * shape.p * shape.units
        if actions > _MOST_ACTIONS:
            raise PlanError(
                f"{actions:,} forwards and backwards: above {_MOST_ACTIONS:,} this would take minutes; use fewer "
                "ranks, virtual stages, slices or microbatches"
            )
        plan = build(name, shape)
        exchange = None
        if setting is not None:
            exchange = setting.exchange(plan, mode)
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
            host = None if keys is None else keys.links()
            if swaps is not None:
                host = swaps.links(None if keys is None else keys.stream)
            return simulate(plan, costs, link, gatherings=gatherings, host=host)

        timeline, swap = on_paper(), None
        kept = timeline
        if swaps is not None:
            plan, swap = swaps.apply(plan, kept)
            timeline = on_paper()
        peaks = check(plan, exchange, swap=swap)
        if not math.isfinite(timeline.makespan):
            raise PlanError("the costs are too large to be added up; use smaller ones")
        return cls(plan, head, timeline, peaks, exchange, setting, kept, swap, swaps, keys)

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
            **({"kv_swap": False} if self.keys is None else self.keys.report(self.plan, self.timeline)),
        }

    def _swap(self) -> dict[str, Any]:
        if self.swaps is None or self.swap is None:
            return {"swap": "off"}
        return self.swaps.report(self.plan, self.swap, self.timeline, self.kept)

    def _exchange(self) -> dict[str, Any]:
        if self.setting is not None and self.exchange is not None:
            return self.setting.report(self.exchange)
        return {"exchange": "off", "exchange_bytes": [0.0] * self.plan.shape.p, "loans": 0}
