"""What a simulated step looked like: who ran what when, who idled, what was held and what was sent."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from slimpipe.schedule.flow import Span
from slimpipe.schedule.host_link import HostCopy
from slimpipe.schedule.in_flight import peak_kept
from slimpipe.schedule.plan import Shape
from slimpipe.schedule.transfers import Kind
from slimpipe.schedule.wire import Transfer


@dataclass(frozen=True)
class Timeline:
    """`spans[r]`: what held rank r, in order. `transfers`: every tensor that changed ranks, in order of discovery.

    `waited[r]`: how much of its spans rank r spent waiting for those it exchanges attention with; empty: nothing.
    """

    name: str
    shape: Shape
    spans: tuple[tuple[Span, ...], ...]
    transfers: tuple[Transfer, ...]
    tensor_bytes: int = 0
    waited: tuple[float, ...] = ()
    copies: tuple[HostCopy, ...] = ()
    """Activations, and keys and values, on their way to host memory and back, of all ranks."""
    swap_waited: tuple[float, ...] = ()
    """By rank, time in which compute waited for such copies and for nothing else."""
    keys_waited: tuple[float, ...] = ()
    """By rank, how much of its spans it waited for copies of keys and values."""

    @cached_property
    def makespan(self) -> float:
        """From the start of the step to the last rank's end."""
        return max(spans[-1].end if spans else 0.0 for spans in self.spans)

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """Each rank's time within the makespan in which it ran nothing."""
        none = (0.0,) * self.shape.p
        return tuple(
            self.makespan - sum(span.end - span.start for span in spans) + exchange + keys
            for spans, exchange, keys in zip(self.spans, self.waited or none, self.keys_waited or none, strict=True)
        )

    @property
    def bubble_fraction(self) -> float:
        """Idle share of all rank time."""
        return sum(self.idle) / (self.shape.p * self.makespan)

    @cached_property
    def peak_units(self) -> tuple[int, ...]:
        """Each rank's most units in flight; of an evaluation's plan, with keys and values kept."""
        return tuple(peak_kept(self.shape, (span.action for span in spans)) for spans in self.spans)

    @property
    def peak_activation_by_rank(self) -> tuple[float, ...]:
        """Each rank's peak in units of M_a, the activations of one microbatch over all layers: a unit is 1/(n v p)."""
        return tuple(units / (self.shape.n * self.shape.stages) for units in self.peak_units)

    @property
    def peak_activation(self) -> float:
        """The worst rank's, in M_a: what Eq. 1 of the SlimPipe paper gives."""
        return max(self.peak_activation_by_rank)

    @cached_property
    def sent(self) -> dict[Kind, int]:
        """Tensors that changed ranks, by kind."""
        counts = Counter(transfer.link.kind for transfer in self.transfers)
        return {"F": counts["F"], "B": counts["B"]}

    @property
    def bytes_sent(self) -> dict[Kind, int]:
        """`sent` in bytes; 0 where the simulation was given no LinkCost."""
        return {kind: count * self.tensor_bytes for kind, count in self.sent.items()}
