"""A mixture of experts under one plan: the tokens of each expert change from step to step, the total does not.

The plan is made with 32 tokens an expert. What is asked of the other steps: every number as without swap, most bytes
moved by plan, none fetched late, the budget kept.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slimpipe.swap import SimulatedStreams, Stage, SwapManager, SwapSettings
from slimpipe.swap.signature import close
from tests.swap.support import check_clean, differences

WIDTH, TOKENS, LAYERS = 16, 128, 6
MIN_BYTES = 1024
BUDGET = 300_000
LOADS: dict[str, tuple[int, ...]] = {
    "as profiled": (32, 32, 32, 32),
    "within 5 %": (33, 31, 32, 32),
    "beyond 5 %": (40, 25, 36, 27),
    "far beyond": (64, 24, 20, 20),
    "one hot": (100, 10, 9, 9),
    "one under min_bytes": (44, 1, 42, 41),
    "one without tokens": (43, 0, 43, 42),
    "one with all": (0, 128, 0, 0),
}


class Experts(nn.Module):
    """Rows in order: the first `loads[0]` go to the first expert, and so on."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(count))
        self.down = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: Tensor, loads: tuple[int, ...]) -> Tensor:
        parts = []
        for up, down, rows in zip(self.up, self.down, self.norm(x).split(loads), strict=True):
            if len(rows):
                parts.append(down(nn.functional.gelu(up(rows.contiguous() * 2.0))))
        return x + torch.cat(parts)


def train(step: Any, loads: list[tuple[int, ...]], after: Any = lambda: None) -> list[Tensor]:
    torch.manual_seed(0)
    layers = nn.ModuleList(Experts() for _ in range(LAYERS))
    found = []
    for i, load in enumerate(loads):
        x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(i))
        manage: AbstractContextManager[None] = step()
        with manage:
            # Each layer's busiest expert is another one.
            for number, layer in enumerate(layers):
                shift = number % len(load)
                x = layer(x, load[shift:] + load[:shift])
            x.square().mean().backward()
        found += [x.detach().clone(), *(p.grad.clone() for p in layers.parameters() if p.grad is not None)]
        layers.zero_grad()
        del x
        after()
    return found


@pytest.mark.filterwarnings("ignore:swap")
@pytest.mark.parametrize("name", LOADS)
def test_a_plan_keeps_working_when_sizes_change(name: str) -> None:
    streams = SimulatedStreams(order="random", rate=2e9)
    settings = SwapSettings(min_bytes=MIN_BYTES, arena_bytes=1 << 16, policies=1)
    manager = SwapManager(BUDGET, 8 << 20, settings=settings, streams=streams)
    loads = [LOADS["as profiled"]] * 4 + [LOADS[name]] * 2
    steps: list[dict[str, float]] = []

    def after() -> None:
        counts, now = manager.counts, {"peak": float(streams.peak_memory(restart=True))}
        for key in ("moved_out", "planned_out", "fetched_late"):
            now[key] = getattr(counts, key) - sum(step[key] for step in steps)
        steps.append(now)

    found = train(manager.step, loads, after)
    assert differences(found, train(nullcontext, loads)) == []
    assert manager.stages.known and manager.profiled_steps == 1
    check_clean(manager)
    planned = steps[3]
    assert planned["moved_out"] == planned["planned_out"] > 0
    for step in steps[4:]:
        assert step["planned_out"] >= 0.85 * step["moved_out"]
        assert step["fetched_late"] == 0
        assert step["peak"] <= 1.02 * BUDGET


def test_tokens_that_change_make_no_other_kind_of_step() -> None:
    """It is the sum of the saved bytes that tells kinds apart, to 5 %, not the size of each tensor."""
    manager = SwapManager(BUDGET, 8 << 20, settings=SwapSettings(min_bytes=64), streams=SimulatedStreams())
    train(manager.step, [LOADS["as profiled"]] * 4 + [LOADS["within 5 %"], LOADS["beyond 5 %"], LOADS["far beyond"]])
    assert manager.stage is Stage.STABLE and manager.stages.changes == 0
    assert close(100, 105, 0.05) and not close(100, 106, 0.05)
