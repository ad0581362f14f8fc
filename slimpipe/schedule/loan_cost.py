"""What a loan's transfers cost, by link, and whether it is worth them (docs/exchange.md).

A loan makes three transfers a layer (`schedule.exchange_transfers`): keys and values of the range, which grow with it,
and what does not: query and partial output of the whole slice, in the backward also the merged output, LSE and output's
gradient, and the gradients back. In a backward that runs attention again they are five.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

from slimpipe.schedule.exchange_transfers import BatchName, batches
from slimpipe.schedule.moves import Passes
from slimpipe.schedule.plan import PlanError
from slimpipe.schedule.slots import KINDS, Kind
from slimpipe.schedule.work import Work


@dataclass(frozen=True)
class LoanBytes:
    """One layer's. `kv_token`: keys and values of one token. `query`: a slice's query, as large as its output. `lse`:
    the log-sum-exp of a slice. `again`: backwards run attention again."""

    kv_token: int
    query: int
    lse: int
    again: bool = False

    def of(self, kind: Kind, batch: BatchName, tokens: int) -> int:
        """Bytes of one loan's transfers of a batch, in one direction: A and B to the helper, C back."""
        ranges, fixed = self._tensors[kind, batch]
        return round(ranges * (self.kv_token * tokens / 2) + fixed)

    @cached_property
    def _tensors(self) -> dict[tuple[Kind, BatchName], tuple[int, int]]:
        """Of each batch, how many tensors are as long as the range, and the bytes of the others."""
        fixed = {"Q": self.query, "out": self.query, "LSE": self.lse, "dOut": self.query, "dQ": self.query}
        return {
            (kind, batch): (
                sum(tensor not in fixed for tensor in tensors),
                sum(fixed.get(tensor, 0) for tensor in tensors),
            )
            for kind in KINDS
            for batch, tensors in batches(kind, self.again).items()
        }


@dataclass(frozen=True)
class Rate:
    """A way between two ranks: latency, and bandwidth in bytes per unit of time, each way."""

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if self.latency < 0 or self.bandwidth <= 0:
            raise PlanError(f"{self}: latency must be >= 0, bandwidth > 0")


@dataclass(frozen=True)
class Network:
    """Ranks in nodes of `ranks_per_node`, in turn; what one rank can send and receive inside its node and beyond.

    `between` None: not known, and asked for in vain.
    """

    inside: Rate
    between: Rate | None
    ranks_per_node: int

    def rate(self, a: int, b: int) -> Rate:
        """The way from rank a to rank b. Raises PlanError where it is not known."""
        if a // self.ranks_per_node == b // self.ranks_per_node:
            return self.inside
        if self.between is None:
            raise PlanError(
                f"ranks {a} and {b} are on two nodes of {self.ranks_per_node}, and the hardware profile has no link "
                "between nodes; add between: {latency_us: ..., gb_per_s: ...}"
            )
        return self.between


def loan_time(sizes: LoanBytes, rate: Rate, kind: Kind, tokens: int) -> float:
    """How long one loan's transfers of one layer take a link, one after another."""
    return sum(rate.latency + sizes.of(kind, batch, tokens) / rate.bandwidth for batch in batches(kind, sizes.again))


def worth_it(work: Work, sizes: LoanBytes, network: Network, layers: int) -> Passes:
    """The cost test: a loan is made where its transfers take no longer than the attention that it saves its owner.

    `work` is of units of `layers` layers.
    """

    @cache
    def pays(kind: Kind, rate: Rate, tokens: int) -> bool:
        return loan_time(sizes, rate, kind, tokens) <= work.of(kind).token * tokens / layers

    def passes(kind: Kind, owner: int, helper: int, tokens: int) -> bool:
        return pays(kind, network.rate(owner, helper), tokens)

    return passes
