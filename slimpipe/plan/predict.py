"""What a run's step takes on paper: its plan through the simulator, at a hardware profile's rates."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from slimpipe.plan.exchange import ExchangeSetting
from slimpipe.plan.hardware import HardwareProfile
from slimpipe.schedule import Exchange, HostLinks, Plan, Timeline, output_layer_costs, simulate

if TYPE_CHECKING:
    from slimpipe.config import Config


def predict(
    config: Config,
    plan: Plan,
    exchange: Exchange | None,
    hardware: HardwareProfile,
    host: HostLinks | None = None,
) -> Timeline:
    """The step's timeline in seconds: GEMMs, attention, what of both is recomputed, transfers and the output layer, at
    the profile's rates; norms, RoPE, SwiGLU and sums where it knows the memory's. `host`: what swaps take.

    Left out: optimizer, launches. Raises PlanError for unequal stages, whose units are no equal work.
    """
    model, shape, length = config.model, config.shape, config.data.sequence_length
    b = config.train.micro_batch
    setting = ExchangeSetting.on_hardware(hardware, model, shape, length, None, config.memory.recompute, b)
    tokens = b * (length // shape.n)
    head = 2.0 * tokens * model.hidden_size * model.vocab_size / hardware.gemm.at(tokens)
    costs = replace(setting.work.costs(), vocabulary=output_layer_costs(head, shape.p))
    gatherings = setting.gatherings(exchange) if exchange is not None else None
    return simulate(plan, costs, setting.link, gatherings=gatherings, host=host)
