"""What `simulate --exchange` is about: the work, the times of slots with loans, and the cost test, from options."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from slimpipe.plan.flops import recomputed_shares
from slimpipe.plan.hardware import HardwareProfile, before_attention, loan_bytes
from slimpipe.schedule import (
    Exchange,
    Gatherings,
    LayerByLayer,
    LinkCost,
    Mode,
    Passes,
    Plan,
    PlanError,
    Shape,
    SlotTimes,
    Together,
    Work,
    balance,
    best_granularity,
    default_granule,
    exchange_refusal,
    forward_bytes,
    if_shorter,
    max_imbalance,
    pairwise_bound,
    place_layers,
    sliced_work,
    slots_of,
    worth_it,
)

if TYPE_CHECKING:
    from slimpipe.config.sections import ModelConfig, Recompute


@dataclass(frozen=True)
class ExchangeSetting:
    """`link`, `passes`: None where transfers are free. `kv_share`: KV heads a query head."""

    work: Work
    times: SlotTimes
    ranks_per_node: int | None = None
    kv_share: Fraction = Fraction(1)
    link: LinkCost | None = None
    passes: Passes | None = None

    @classmethod
    def on_paper(cls, n: int, attention_share: float) -> ExchangeSetting:
        """Times in mean forwards of a unit, transfers free, slices of 512 tokens so that granules are a quarter."""
        work = sliced_work(n, attention_share, 512)
        return cls(work, Together(work))

    @classmethod
    def on_hardware(
        cls,
        hardware: HardwareProfile,
        model: ModelConfig,
        shape: Shape,
        sequence: int,
        attention_share: float | None,
        recompute: Recompute = "none",
        micro_batch: int = 1,
    ) -> ExchangeSetting:
        """Times in seconds. `attention_share` None: what the profile's rates make of the model and the sequence."""
        if sequence % shape.n:
            raise PlanError(f"--sequence = {sequence}: not divisible by --slices = {shape.n}")
        refusal = exchange_refusal(place_layers(model.layers, shape.stages))
        if refusal is not None:
            raise PlanError(refusal)
        layers, tokens = model.layers // shape.stages, sequence // shape.n
        work = hardware.work(model, layers, tokens, micro_batch, shape.n, recompute)
        if attention_share is not None:
            work = work.with_attention_share(shape.n, attention_share)
        work = work.recomputing(*recomputed_shares(model, recompute))
        sizes, network = loan_bytes(model, tokens, micro_batch, again=work.again is not None), hardware.network
        return cls(
            work,
            LayerByLayer(work, layers, before_attention(model), sizes, network),
            network.ranks_per_node,
            Fraction(model.kv_heads, model.heads),
            hardware.link(model, shape.p, tokens, micro_batch),
            worth_it(work, sizes, network, layers),
        )

    def exchange(self, plan: Plan, mode: Mode, granule: int | None = None) -> Exchange:
        """The plan's loans. Mode `balanced` takes quarter slices and fills by time; with transfers, what is best, which
        may be no loans. `granule`, in tokens, replaces either."""
        tokens, near = self.work.slice_tokens, self.ranks_per_node
        if self.passes is None or mode != "balanced":
            return balance(plan, mode, self.work, granule or default_granule(tokens), tokens, ranks_per_node=near)
        best = best_granularity(slots_of(plan), self.work, self.times, self.passes, near or plan.shape.p)
        found = balance(
            plan,
            mode,
            self.work,
            granule or best.granule,
            tokens,
            self.passes,
            fill=best.fill,
            ranks_per_node=near,
            times=self.times,
        )
        return if_shorter(plan, found, self.times, self.work.costs(), self.link)

    def gatherings(self, exchange: Exchange) -> Gatherings:
        """For one simulation."""
        return Gatherings(exchange, self.times)

    def report(self, exchange: Exchange) -> dict[str, Any]:
        """What `--json` adds. Bytes by rank, forward, sent and received, in L M_h a microbatch."""
        return {
            "exchange": exchange.mode,
            "exchange_granule": exchange.granule / exchange.slice_tokens,
            "exchange_bytes": [float(moved) for moved in forward_bytes(exchange, self.kv_share)],
            "exchange_bytes_bound": float(pairwise_bound(exchange.slots.shape, self.kv_share)),
            "loans": len(exchange.loans),
            "max_imbalance_kv_slices": max_imbalance(exchange, self.work),
        }
