"""What `simulate --swap` and `memory.swap` are about: bytes of units, the link to the host, and the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from slimpipe.plan.hardware import HardwareProfile
from slimpipe.plan.memory import kv_gradient_bytes, layer_bytes_per_token
from slimpipe.schedule import (
    HostLinks,
    KVStream,
    Plan,
    PlanError,
    Rate,
    Shape,
    Swap,
    Timeline,
    UnitBytes,
    add_swap,
    assign_kv_slots,
    least_swap,
    most_held,
    share_swap,
)

if TYPE_CHECKING:
    from slimpipe.config.sections import ModelConfig, Recompute

Amount = Literal["off", "auto"] | float
"""Of the activations that can move: none, the least that fits, or this share (0 to 1)."""

DEFAULT_HOST: Final = Rate(10e-6, 50e9)
"""Where no profile says it: what an H200 gets each way, both at once, on PCIe 5 x16 (docs/h200.md)."""
DEFAULT_FLOPS: Final = 500e12
"""Operations a second that go with it, attention and all else together."""
MIN_BYTES: Final = 1 << 20
"""Smaller tensors stay on the device: their copies would cost more than they free."""


MOST_FOR_KEYS: Final = 0.75
"""Share of a link's time that is set aside for keys and values at most, when units are chosen."""


def host_link(hardware: HardwareProfile | None) -> Rate:
    """Each way of a rank's link to its host, in seconds and bytes."""
    return hardware.host if hardware is not None and hardware.host is not None else DEFAULT_HOST


def unit_bytes(
    model: ModelConfig,
    recompute: Recompute,
    shape: Shape,
    placement: Sequence[range],
    slice_tokens: int,
    micro_batch: int = 1,
    element: int = 2,
    least: int = MIN_BYTES,
    with_slots: bool = False,
) -> UnitBytes:
    """What units of a Llama's layers keep outside the KV slots, and what of it can go to the host.

    `placement[g]`: stage g's layers. `element`: bytes a number. Tensors of fewer than `least` bytes stay, and so do
    keys and values, which count as held `with_slots`.
    """
    tokens = slice_tokens * micro_batch
    layer = {name: size * tokens for name, size in layer_bytes_per_token(model, recompute, element).items()}
    slots = layer.pop("k, v")
    # Layers of a unit share one rotary table, cosine and sine in fp32; a block that runs twice keeps it at hand.
    table = 2 * model.head_dim * slice_tokens
    tables_move = 2 * table if recompute in ("none", "norms", "mlp") and table >= least else 0
    held = sum(layer.values()) + (slots if with_slots else 0)
    movable = sum(size for size in layer.values() if size >= least)

    def by_chunk(a_layer: int, a_unit: int) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(len(placement[shape.stage(rank, chunk)]) * a_layer + a_unit for chunk in range(shape.v))
            for rank in range(shape.p)
        )

    return UnitBytes(by_chunk(held, 2 * table), by_chunk(movable, tables_move))


def key_stream(
    model: ModelConfig,
    shape: Shape,
    placement: Sequence[range],
    tokens: int,
    ranks: Sequence[bool],
    element: int = 2,
) -> KVStream:
    """Keys, values and their gradients in host memory, on these ranks; `tokens`: of one unit, over its sequences."""
    layers = tuple(
        tuple(len(placement[shape.stage(rank, chunk)]) for chunk in range(shape.v)) for rank in range(shape.p)
    )
    keys = 2 * element * model.kv_heads * model.head_dim * tokens
    return KVStream(tuple(ranks), layers, keys, kv_gradient_bytes(model, shape, 1, 1, tokens * shape.n))


class KeysSetting(NamedTuple):
    """What `simulate --kv-swap` is about: keys and values on the host, and the link that they go over, in seconds."""

    stream: KVStream
    link: Rate

    def links(self) -> HostLinks:
        """For one simulation in which nothing else moves."""
        return HostLinks(len(self.stream.ranks), None, self.link, self.stream)

    def report(self, plan: Plan, timeline: Timeline) -> dict[str, Any]:
        """What `--json` adds, by rank."""
        slots = [assign_kv_slots(plan.shape, plan.compute(rank)) for rank in range(plan.shape.p)]
        moved = [self.stream.moved(plan, rank, found) for rank, found in enumerate(slots)]
        return {
            "kv_swap": True,
            "kv_host_bytes": [self.stream.on_host(rank, found.capacity) for rank, found in enumerate(slots)],
            "kv_out_bytes": [out for out, _ in moved],
            "kv_in_bytes": [back for _, back in moved],
            "kv_waited": list(timeline.keys_waited),
        }


@dataclass(frozen=True)
class SwapSetting:
    """`link`: of a rank to its host, in bytes and the unit of time of what is simulated. `budget`: of `auto`, by rank,
    bytes that units in flight may hold on the device."""

    amount: Amount
    sizes: UnitBytes
    link: Rate
    budget: tuple[float, ...] | None = None

    @classmethod
    def on_paper(cls, amount: Amount, shape: Shape, copy: float, budget: float | None) -> SwapSetting:
        """Units of size 1, copied one way in the time `copy`. `budget`: in activations of one microbatch, on any
        rank."""
        if not 0 <= copy < float("inf"):
            raise PlanError(f"--copy-cost = {copy}: must be a number >= 0")
        setting = cls(amount, UnitBytes.equal(shape), Rate(0.0, 1.0 / copy if copy else float("inf")))
        return setting.within(shape, budget)

    def within(self, shape: Shape, budget: float | None) -> SwapSetting:
        """The same with `auto`'s budget in activations of one microbatch over all layers, on any rank."""
        if (self.amount == "auto") != (budget is not None):
            raise PlanError(
                "--swap = auto: needs --activation-budget, in activations of one microbatch"
                if budget is None
                else f"--activation-budget = {budget}: says something with --swap auto alone; leave it out"
            )
        if budget is None:
            return self
        if not 0 < budget < float("inf"):
            raise PlanError(f"--activation-budget = {budget}: must be a number > 0")
        return SwapSetting(self.amount, self.sizes, self.link, (budget * self.microbatch(shape),) * shape.p)

    def microbatch(self, shape: Shape) -> int:
        """Bytes of one microbatch's activations over all stages."""
        return shape.n * sum(map(sum, self.sizes.held))

    def links(self, kv: KVStream | None = None) -> HostLinks:
        """For one simulation. `kv`: keys and values that stream over the same links."""
        return HostLinks(len(self.sizes.held), self.sizes, self.link, kv)

    def apply(self, plan: Plan, timeline: Timeline) -> tuple[Plan, Swap | None]:
        """The plan with its swaps. `timeline`: the plan's, without any; keys and values that stream are in it."""
        if self.amount == "off" or (self.amount == "auto" and self.budget is None):
            return plan, None
        # Copies of keys and values come first: the next layer waits for them.
        link = Rate(self.link.latency, self.link.bandwidth * (1 - _most_busy(timeline)))
        if self.amount == "auto":
            assert self.budget is not None
            swap = least_swap(timeline, self.sizes, link, self.budget)
        else:
            swap = share_swap(timeline, self.sizes, link, self.amount)
        return (add_swap(plan, swap), swap) if any(swap.trips) else (plan, swap)

    def report(self, plan: Plan, swap: Swap, timeline: Timeline, kept: Timeline) -> dict[str, Any]:
        """What `--json` adds: of all that can move the share that does, by rank; memory in activations of one
        microbatch. `kept`: the timeline without swaps."""
        shape, whole = plan.shape, self.microbatch(plan.shape)
        peaks = [
            most_held(actions, self.sizes.held[rank], self.sizes.movable[rank])
            for rank, actions in enumerate(plan.ranks)
        ]
        movable = [shape.m * shape.n * sum(chunks) for chunks in self.sizes.movable]
        return {
            "swap": self.amount,
            "moved_share": [swap.moved(rank) / bytes if bytes else 0.0 for rank, bytes in enumerate(movable)],
            "device_activation": [peak.device / whole for peak in peaks],
            "host_activation": [peak.host / whole for peak in peaks],
            "swap_fits": swap.fits,
            "swap_waited": list(timeline.swap_waited),
            "makespan_without_swap": kept.makespan,
        }


def _most_busy(timeline: Timeline) -> float:
    """Share of the step in which the busiest link carries keys and values; at most MOST_FOR_KEYS."""
    busy: dict[tuple[int, bool], float] = {}
    for copy in timeline.copies:
        busy[copy.rank, copy.inward] = busy.get((copy.rank, copy.inward), 0.0) + copy.end - copy.start
    return min(MOST_FOR_KEYS, max(busy.values(), default=0.0) / timeline.makespan)
