"""From settings to a plan that is proven sound: every rank makes the same one, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from slimpipe.plan.exchange import ExchangeSetting
from slimpipe.plan.flops import layer_flops_per_token, recomputed_shares
from slimpipe.plan.hardware_file import load_hardware
from slimpipe.schedule import (
    Costs,
    Exchange,
    Gatherings,
    HostLinks,
    KVStream,
    Peaks,
    Plan,
    Rate,
    Swap,
    Timeline,
    Together,
    Work,
    add_exchange,
    add_vocabulary,
    balance,
    build,
    check,
    collector_paused,
    default_granule,
    forward_only,
    if_shorter,
    least_send_window,
    lower,
    most_held,
    output_layer_costs,
    place_layers,
    simulate,
    sliced_work,
)

if TYPE_CHECKING:
    from slimpipe.config import Config

_MOST_ACTIONS: Final = 500_000


@dataclass(frozen=True)
class Planned:
    """A run's plan, and what was found out about it."""

    plan: Plan
    exchange: Exchange | None
    """Its loans, where `pipeline.exchange` asks for them and more than one rank can make them."""
    send_window: int
    """Sends of one link that may be under way at once: two, or more where the plan's order needs more."""
    peaks: Peaks
    swap: Swap | None = None
    """What goes to the host, where `memory.swap` asks for it (`slimpipe.train.swapping`)."""
    swap_waits: tuple[float, ...] = ()
    """By rank, seconds that compute waits for it, on paper."""
    kv: KVStream | None = None
    """On which ranks keys and values are in host memory, where `memory.kv_swap` has them there."""
    kv_waits: tuple[float, ...] = ()
    """As `swap_waits`, for keys and values."""

    def kv_bytes(self, rank: int) -> int:
        """Of host memory for keys and values and their gradients."""
        return 0 if self.kv is None else self.kv.on_host(rank, self.peaks.kv_slots[rank])

    def host_bytes(self, rank: int) -> int:
        """Of host memory, at most at once."""
        units = 0
        if self.swap is not None:
            sizes = self.swap.bytes
            units = most_held(self.plan.ranks[rank], sizes.held[rank], sizes.movable[rank]).host
        return units + self.kv_bytes(rank)

    @property
    def moves(self) -> bool:
        """Whether anything may go to the host on some rank."""
        return self.swap is not None or self.kv is not None

    def host_links(self, rate: Rate) -> HostLinks | None:
        """For one simulation; None where nothing moves. `rate`: of a rank's link, each way, in seconds and bytes."""
        if not self.moves:
            return None
        return HostLinks(self.plan.shape.p, None if self.swap is None else self.swap.bytes, rate, self.kv)


@collector_paused()
def make_plan(config: Config, progress: Callable[[str], None] = lambda what: None) -> Planned:
    """The run's plan: built, lowered, proven sound, and replayed under NCCL's in-order rule. Raises PlanError.

    `progress` is told what is being done: with hundreds of thousands of actions it takes a while (docs/planning.md).
    """
    progress("building the plan")
    plan, exchange = _passes(
        config, build(config.pipeline.schedule, config.shape), config.pipeline.exchange != "off", progress
    )
    progress("checking the plan")
    peaks = check(plan, exchange)
    progress("replaying the plan in NCCL's order")
    window = least_send_window(plan, exchange=exchange, at_least=2)
    return Planned(plan, exchange, window, peaks)


@collector_paused()
def make_evaluation_plan(config: Config, trained: Planned, progress: Callable[[str], None]) -> Planned:
    """The plan of an evaluation of one global batch: the schedule's forwards, with passes and loans of their own.

    `trained`: what `make_plan` gave. Both use its communicator of the exchange: where it lends nothing, nor does an
    evaluation. Raises PlanError as `make_plan` does.
    """
    progress("building the evaluation's plan")
    plan = forward_only(build(config.pipeline.schedule, config.shape))
    plan, exchange = _passes(config, plan, trained.exchange is not None, progress)
    peaks = check(plan, exchange, forward_only=True)
    window = least_send_window(plan, exchange=exchange, at_least=2)
    return Planned(plan, exchange, window, peaks)


def _passes(config: Config, plan: Plan, lend: bool, progress: Callable[[str], None]) -> tuple[Plan, Exchange | None]:
    """The plan with what the settings ask for beside forwards and backwards; loans if `lend`."""
    work = _work(config)
    exchange = None
    if lend and config.parallel.pp > 1:
        progress("balancing the plan")
        exchange = _exchange(config, plan, work)
    if exchange is not None:
        plan = add_exchange(plan, exchange)
    if config.vocab_parallel:
        progress("placing the vocabulary passes")
        # Without exchange slices are unequal work, and passes stand where that leaves room; with it ranks are in phase.
        plan = add_vocabulary(plan, work.costs() if exchange is None else None)
    # With collectives or loans under way as well, receives posted ahead are one thing more that can wait for another:
    # on two H200 such a run did not get through its first steps, and without it did (docs/log.md, 2026-11-29).
    ahead = config.pipeline.receives_ahead
    if ahead is None:
        ahead = 2 if exchange is None and not config.vocab_parallel else 0
    return lower(plan, ahead), exchange


def _exchange(config: Config, plan: Plan, work: Work) -> Exchange | None:
    """The loans to make; None where there are none that pay."""
    mode, granule = config.pipeline.exchange, config.pipeline.exchange_granule
    if config.pipeline.hardware is None:
        # Balanced by attention, not by the slots' whole time: an owner waits for its longest helper in every layer.
        granule = granule or default_granule(work.slice_tokens)
        return balance(plan, mode, work, granule, work.slice_tokens, fill="attention")
    hardware = load_hardware(config.pipeline.hardware)
    setting = ExchangeSetting.on_hardware(
        hardware,
        config.model,
        config.shape,
        config.data.sequence_length,
        None,
        config.memory.recompute,
        config.train.micro_batch,
    )
    found = setting.exchange(plan, mode, granule)
    if mode == "pairwise":  # its loans are the paper's, all or none
        found = if_shorter(plan, found, setting.times, setting.work.costs(), setting.link)
    return found if found.loans else None


def on_paper(config: Config, planned: Planned) -> Timeline | None:
    """The run's step simulated by operations, transfers free, in forwards of a unit; None where the plan is so long
    that it would take many seconds."""
    return None if sum(map(len, planned.plan.ranks)) > _MOST_ACTIONS else by_operations(config, planned)


def by_operations(config: Config, planned: Planned, host: HostLinks | None = None, forward: float = 1.0) -> Timeline:
    """The same however long the plan is. `forward`: what a unit's forward takes on average, and the unit of `host`'s
    times: what swaps take."""
    work, model = _work(config), config.model
    gemm, attention = layer_flops_per_token(model, config.data.sequence_length)
    mean = model.layers / config.shape.stages
    head = 2.0 * model.hidden_size * model.vocab_size / (mean * (gemm + attention))
    placement = place_layers(model.layers, config.shape.stages, config.pipeline.layers_per_stage)
    share = [len(layers) / mean for layers in placement]
    even = work.costs()
    costs = Costs(
        lambda stage, unit: forward * share[stage] * even.forward(stage, unit),
        lambda stage, unit: forward * share[stage] * even.backward(stage, unit),
        output_layer_costs(forward * head, config.shape.p),
    )
    gatherings = None if planned.exchange is None else Gatherings(planned.exchange, Together(work.scaled(forward)))
    return simulate(planned.plan, costs, gatherings=gatherings, host=host)


def _work(config: Config) -> Work:
    """What a slice's forward and backward take, by operations: GEMMs and attention are taken to be equally fast."""
    gemm, attention = layer_flops_per_token(config.model, config.data.sequence_length)
    tokens = config.data.sequence_length // config.shape.n
    work = sliced_work(config.shape.n, attention / (gemm + attention), tokens)
    return work.recomputing(*recomputed_shares(config.model, config.memory.recompute))
