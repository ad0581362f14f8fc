"""Where ranks idle with the output layer on the last rank, and with vocabulary passes: simulated, on no GPU.

    python -m benchmarks.vocabulary_simulation

Llama-8B shape, 64K tokens unless said otherwise. GEMMs run at 680 TFLOP/s, attention at 590 forward and 535 backward
(docs/h200.md); what takes no FLOPs is free. Links, and collectives beside compute: 100 GB/s, 30 us.

Attention is either cut by slice, as it is without exchange, or evened out, as the exchange is to leave it: its whole
cost, the same for every slice. Idle shares are of all rank time; the output layer's work is the same in both layouts.
`over_even_split`: what the step takes beyond one without output layer plus each rank's share of it.
`idle_passes_in_phase`: with places that suit even costs (`add_vocabulary` given no costs).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import record
from slimpipe.config.sections import ModelConfig
from slimpipe.plan.flops import layer_flops_per_token
from slimpipe.schedule import (
    Costs,
    LinkCost,
    Plan,
    Shape,
    Timeline,
    add_vocabulary,
    build,
    check,
    equal_costs,
    lower,
    output_layer_costs,
    simulate,
    sliced_costs,
)

RESULTS = Path(__file__).parent / "results" / "vocabulary_simulation.jsonl"
GEMM, ATTENTION_FORWARD, ATTENTION_BACKWARD = 680e12, 590e12, 535e12
BANDWIDTH, LATENCY = 100e9, 30e-6
COLUMNS = {
    "p": "",
    "layers": "",
    "v": "",
    "n": "",
    "m": "",
    "length": "",
    "attention": "",
    "attention_share": ".3f",
    "head_share": ".3f",
    "idle_without": ".1%",
    "idle_last": ".1%",
    "idle_passes": ".1%",
    "step_last_ms": ".0f",
    "step_passes_ms": ".0f",
    "faster": "+.1%",
    "over_even_split": "+.2%",
}


@dataclass(frozen=True)
class Case:
    p: int
    layers: int
    m: int = 4
    v: int = 1
    length: int = 65536
    slices: int | None = None

    @property
    def n(self) -> int:
        return self.slices or 4 * self.p


CASES = (
    Case(2, 16),
    Case(8, 32),
    Case(8, 64),
    Case(16, 32),
    Case(16, 64),
    # Several chunks a rank.
    Case(8, 32, v=2),
    Case(16, 64, v=2),
    # What benchmarks/pipeline.py runs on two GPUs.
    Case(2, 16, m=2),
    Case(2, 16, m=2, slices=16),
    Case(2, 16, length=16384, slices=4),
)


def model(layers: int) -> ModelConfig:
    return ModelConfig(
        layers=layers, hidden_size=4096, heads=32, kv_heads=8, intermediate_size=14336, vocab_size=128256
    )


def costs_of(case: Case, evened: bool) -> tuple[Costs, float, dict[str, float]]:
    """Costs in average forwards of a unit, one such forward in seconds, and the shares that they came from."""
    config = model(case.layers)
    gemm, attention = layer_flops_per_token(config, case.length)
    tokens, layers = case.length / case.n, case.layers / (case.p * case.v)
    dense_s, attention_s = layers * tokens * gemm / GEMM, layers * tokens * attention / ATTENTION_FORWARD
    forward_s = dense_s + attention_s
    share = attention_s / forward_s
    head = 2 * config.hidden_size * config.vocab_size * tokens / GEMM / forward_s
    backward = 2.5 * ATTENTION_FORWARD / ATTENTION_BACKWARD
    costs = equal_costs(1.0, 2 * (1 - share) + backward * share) if evened else sliced_costs(case.n, share, backward)
    costs = replace(costs, vocabulary=output_layer_costs(head, case.p))
    return costs, forward_s, {"attention_share": share, "head_share": head}


def rows() -> Iterator[dict[str, Any]]:
    for evened in (False, True):
        for case in CASES:
            yield row(case, evened)


def row(case: Case, evened: bool) -> dict[str, Any]:
    shape = Shape(case.p, case.v, case.n, case.m)
    costs, forward_s, shares = costs_of(case, evened)
    tensor_bytes = 2 * model(case.layers).hidden_size * case.length // case.n
    # The simulator's unit of time is a forward.
    link = LinkCost(LATENCY / forward_s, BANDWIDTH * forward_s, tensor_bytes)

    def run(plan: Plan, costs: Costs) -> Timeline:
        plan = lower(plan)
        check(plan)
        return simulate(plan, costs, link)

    plan = build("slimpipe", shape)
    without = run(plan, replace(costs, vocabulary=output_layer_costs(0.0, case.p)))
    last, passes = run(plan, costs), run(add_vocabulary(plan, costs), costs)
    in_phase = run(add_vocabulary(plan), costs)
    # Every rank's share of the output layer on top, and nobody ever waits for it.
    even_split = without.makespan + case.m * case.n * costs.vocabulary.loss / case.p
    return {
        "p": case.p,
        "layers": case.layers,
        "v": case.v,
        "n": case.n,
        "m": case.m,
        "length": case.length,
        "attention": "evened out" if evened else "by slice",
        **shares,
        "forward_ms": forward_s * 1e3,
        "idle_without": without.bubble_fraction,
        "idle_last": last.bubble_fraction,
        "idle_passes": passes.bubble_fraction,
        "idle_passes_in_phase": in_phase.bubble_fraction,
        "step_last_ms": last.makespan * forward_s * 1e3,
        "step_passes_ms": passes.makespan * forward_s * 1e3,
        "faster": last.makespan / passes.makespan - 1,
        "over_even_split": passes.makespan / even_split - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    command = " ".join(["python -m benchmarks.vocabulary_simulation", *sys.argv[1:]])
    made = [row | record.circumstances(command) for row in rows()]
    for one in made:
        record.append(options.results, one)
    record.table(made, COLUMNS, "Output layer on the last rank and in passes, simulated")


if __name__ == "__main__":
    main()
