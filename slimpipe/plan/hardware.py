"""Hardware profiles: what a GPU computes and a link carries, and what follows for a schedule.

`slimpipe.plan.hardware_file` reads and writes them. Attention rates count 4 and 10 operations a query, key and width of
a head, forward and backward, half of that within the own slice, which is causal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slimpipe.plan.elementwise import layer_traffic
from slimpipe.plan.flops import layer_flops_per_token
from slimpipe.plan.rates import SizedRate
from slimpipe.schedule import LinkCost, Load, LoanBytes, Network, Rate, Work

if TYPE_CHECKING:
    from slimpipe.config.sections import ModelConfig, Recompute


@dataclass(frozen=True)
class HardwareProfile:
    """Times in seconds, sizes in bytes, operations a second."""

    name: str
    network: Network
    gemm: SizedRate
    forward: SizedRate
    backward: SizedRate
    own_forward: SizedRate
    own_backward: SizedRate
    memory: float | None = None
    host: Rate | None = None

    def work(
        self,
        model: ModelConfig,
        layers: int,
        slice_tokens: int,
        micro_batch: int = 1,
        n: int = 1,
        recompute: Recompute = "none",
    ) -> Work:
        """What units of `layers` layers and `slice_tokens` tokens, one of `n` slices, consist of, in seconds.

        GEMMs and attention that are recomputed are not counted here (`Work.recomputing`); the memory traffic of what
        else is, is.
        """
        scale = layers * micro_batch
        gemm, _ = layer_flops_per_token(model, slice_tokens)
        dense = scale * slice_tokens * gemm / self.gemm.at(micro_batch * slice_tokens)
        a_token = scale * slice_tokens * 4.0 * model.heads * model.head_dim
        own = a_token * slice_tokens / 2
        moved = layer_traffic(model, recompute, n)
        forward, backward = (0.0 if self.memory is None else scale * slice_tokens * x / self.memory for x in moved)
        rates = [rate.at(slice_tokens) for rate in (self.own_forward, self.forward, self.own_backward, self.backward)]
        return Work(
            Load(dense + forward, own / rates[0], a_token / rates[1]),
            Load(2 * dense + backward, 2.5 * own / rates[2], 2.5 * a_token / rates[3]),
            slice_tokens,
        )

    def link(self, model: ModelConfig, p: int, slice_tokens: int, micro_batch: int = 1, element: int = 2) -> LinkCost:
        """What carries hidden states between stages: the slower of the links that p ranks use."""
        rate = self.network.rate(0, p - 1)
        return LinkCost(rate.latency, rate.bandwidth, element * micro_batch * slice_tokens * model.hidden_size)


def loan_bytes(
    model: ModelConfig, slice_tokens: int, micro_batch: int = 1, element: int = 2, again: bool = False
) -> LoanBytes:
    """What a loan sends in one layer; `element` bytes a number, LSE in fp32. `again`: backwards run attention again."""
    return LoanBytes(
        kv_token=2 * element * micro_batch * model.kv_heads * model.head_dim,
        query=element * micro_batch * slice_tokens * model.heads * model.head_dim,
        lse=4 * micro_batch * slice_tokens * model.heads,
        again=again,
    )


def before_attention(model: ModelConfig) -> float:
    """The part of a layer's GEMMs that stands in front of its attention: the projections to Q, K and V."""
    q_width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return (q_width + 2 * kv_width) / (2 * q_width + 2 * kv_width + 3 * model.intermediate_size)
