"""What cases take on paper, on H200s that need not be here: the step by calibrated rates, and every rank's memory."""

from __future__ import annotations

from typing import Any

import torch

from slimpipe.config import Config
from slimpipe.plan.hardware import HardwareProfile
from slimpipe.plan.predict import predict
from slimpipe.plan.swap import host_link
from slimpipe.schedule import assign_kv_slots
from slimpipe.train.forecast import Forecast
from slimpipe.train.planning import make_plan
from slimpipe.train.swapping import plan_swaps

GIB = 2**30
H200_BYTES = 143_771 * 2**20


def forecast(config: Config, chunk: int | None = None) -> Forecast:
    """On H200s. `chunk`: tokens a chunk of the output layer, where a run has said it."""
    device = torch.device("cuda", 0)
    found = Forecast(
        config, plan_swaps(config, make_plan(config), device, assumed_bytes=H200_BYTES), device, H200_BYTES
    )
    if chunk is not None:
        found.__dict__["chunk"] = chunk
    return found


def row(config: Config, hardware: HardwareProfile) -> dict[str, Any]:
    """Seconds a step, idle share, peak GiB by rank; with swaps what they move and pin on the rank that moves the most,
    and the peaks without them; the same of keys and values that stream (`kv_`)."""
    run = forecast(config)
    planned, swap = run.planned, run.planned.swap
    timeline = predict(config, planned.plan, planned.exchange, hardware, planned.host_links(host_link(hardware)))
    found: dict[str, Any] = {
        "predicted_s": timeline.makespan,
        "predicted_bubble": timeline.bubble_fraction,
        "forecast_gib_by_rank": [round(memory.total / GIB, 2) for memory in run.memory],
    }
    if not planned.moves:
        return found
    kept = forecast(config.model_copy(update={"memory": type(config.memory)(recompute=config.memory.recompute)}))
    ranks = range(config.shape.p)
    found |= {
        "without_swap_gib_by_rank": [round(memory.total / GIB, 2) for memory in kept.memory],
        "host_gib": round(max(map(planned.host_bytes, ranks)) / GIB, 2),
    }
    if swap is not None:
        found |= {
            "moved_gib": round(max(swap.moved(rank) for rank in ranks) / GIB, 2),
            "swap_waits_predicted_s": max(planned.swap_waits),
        }
    if planned.kv is not None:
        slots = [assign_kv_slots(config.shape, planned.plan.compute(rank)) for rank in ranks]
        moved = [planned.kv.moved(planned.plan, rank, slots[rank]) for rank in ranks]
        found |= {
            "kv_streams": list(planned.kv.ranks),
            "kv_host_gib": round(max(map(planned.kv_bytes, ranks)) / GIB, 2),
            "kv_out_gib": round(max(out for out, _ in moved) / GIB, 2),
            "kv_in_gib": round(max(back for _, back in moved) / GIB, 2),
            "kv_waits_predicted_s": max(planned.kv_waits),
        }
    return found
