"""Idle share of attention exchange on paper: the tables of docs/exchange.md.

    python -m benchmarks.exchange_simulation            # some ten minutes
    python -m benchmarks.exchange_simulation --tables   # from the rows in benchmarks/results/exchange_simulation.jsonl

With transfers free, times are by slots: ranks with loans between them go side by side and the longest sets their pace.
With links, times are layer by layer, with every transfer of every loan, for layers of the Llama-70B shape, two a stage,
one GPU a rank, and the sequence at which attention takes the given share of a forward at the profile's rates.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchmarks import record
from slimpipe.config import ModelConfig
from slimpipe.plan.hardware import before_attention, loan_bytes
from slimpipe.plan.hardware_file import load_hardware
from slimpipe.schedule import (
    Exchange,
    Gatherings,
    LayerByLayer,
    LinkCost,
    LoanBytes,
    Network,
    Rate,
    Shape,
    SlotTimes,
    Together,
    Work,
    add_exchange,
    balance,
    bubble_fraction,
    build,
    forward_bytes,
    if_shorter,
    pairwise_bound,
    simulate,
    sliced_work,
    worth_it,
)

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = Path(__file__).parent / "results" / "exchange_simulation.jsonl"
PROFILE: Final = ROOT / "configs/hardware/h200_facts.yaml"

SHAPES: Final = (
    (2, 16, 1, 2),
    (4, 16, 1, 4),
    (8, 32, 1, 1),
    (8, 32, 1, 2),
    (8, 32, 1, 4),
    (8, 32, 5, 4),
    (16, 64, 1, 4),
    (16, 64, 5, 4),
    (32, 128, 1, 4),
    (64, 256, 1, 4),
)
SHARES: Final = (0.5, 0.8, 0.95)
GB_PER_S: Final = {"nvlink": 370, "nccl": 100, "network": 50}
LAYERS: Final = 2
BLOCK: Final = 512
"""Slices are multiples of it, so that a quarter is one of 128 tokens."""
HEADING: Final = (
    *("p, n, v, m", "formula", "free: off", "pairwise", "balanced", "by layers"),
    *("NVLink: off", "pairwise", "balanced", "50 GB/s: off", "pairwise", "balanced"),
    *("tokens a slice", "bytes: pairwise / bound", "balanced"),
)
FREE: Final = Network(Rate(0.0, 1e30), Rate(0.0, 1e30), 1)


def llama_70b() -> ModelConfig:
    return ModelConfig(layers=80, hidden_size=8192, heads=64, kv_heads=8, intermediate_size=28672, vocab_size=128256)


def slice_tokens(n: int, share: float) -> int:
    """Tokens a slice of the sequence at which attention takes `share` of a forward, to the nearest block."""
    profile, model = load_hardware(PROFILE), llama_70b()
    tokens = BLOCK
    # Attention's share grows with the sequence: the first multiple past the asked share, or the one before.
    while _share(profile.work(model, LAYERS, tokens), n) < share:
        tokens += BLOCK
    before = max(BLOCK, tokens - BLOCK)
    return min((before, tokens), key=lambda t: abs(_share(profile.work(model, LAYERS, t), n) - share))


def _share(work: Work, n: int) -> float:
    return 1 - work.forward.dense / work.mean_forward(n)


def rows(case: tuple[tuple[int, int, int, int], float]) -> Iterator[dict[str, Any]]:
    """All modes of a shape and share, transfers free and over each link."""
    (p, n, v, m), share = case
    shape = Shape(p, v, n, m)
    plan = build("slimpipe", shape)
    common = {"p": p, "n": n, "v": v, "m": m, "attention_share": share}
    common["formula"] = float(bubble_fraction("slimpipe", shape))

    def row(links: str, mode: str, exchange: Exchange, work: Work, times: SlotTimes, link: LinkCost | None) -> Any:
        timeline = simulate(add_exchange(plan, exchange), work.costs(), link, gatherings=Gatherings(exchange, times))
        return common | {
            "links": links,
            "mode": mode,
            "idle_share": timeline.bubble_fraction,
            "loans": len(exchange.loans),
            "bytes_busiest_rank": float(max(forward_bytes(exchange))),
            "bytes_bound": float(pairwise_bound(shape)),
            "slice_tokens": exchange.slice_tokens if link is not None else None,
        }

    work = sliced_work(n, share, BLOCK)
    for mode in ("off", "pairwise", "balanced"):
        exchange = balance(plan, mode, work, BLOCK // 4, BLOCK)
        yield row("free", mode, exchange, work, Together(work), None)
    by_layer = LayerByLayer(work, LAYERS, before_attention(llama_70b()), LoanBytes(0, 0, 0), FREE)
    exchange = balance(plan, "balanced", work, BLOCK // 4, BLOCK, fill="attention")
    yield row("free by layers", "balanced", exchange, work, by_layer, None)

    profile, model, tokens = load_hardware(PROFILE), llama_70b(), slice_tokens(n, share)
    work, sizes = profile.work(model, LAYERS, tokens).with_attention_share(n, share), loan_bytes(model, tokens)
    for name, speed in GB_PER_S.items():
        rate = replace(profile.network.inside, bandwidth=1e9 * speed)
        network = Network(rate, rate, p)
        times = LayerByLayer(work, LAYERS, before_attention(model), sizes, network)
        link = LinkCost(rate.latency, rate.bandwidth, 2 * tokens * model.hidden_size)
        for mode in ("off", "pairwise", "balanced"):
            passes = worth_it(work, sizes, network, LAYERS) if mode == "balanced" else None
            exchange = balance(plan, mode, work, tokens // 4, tokens, passes, fill="attention", times=times)
            if mode == "balanced":
                exchange = if_shorter(plan, exchange, times, work.costs(), link)
            yield row(name, mode, exchange, work, times, link)


def all_rows(case: tuple[tuple[int, int, int, int], float]) -> list[dict[str, Any]]:
    return list(rows(case))


def tables() -> str:
    """The rows as Markdown, a table a share."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in RESULTS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        key = (row["p"], row["n"], row["v"], row["m"], row["attention_share"], row["links"], row["mode"])
        found[key] = row
    columns = (
        ("free", "off"),
        ("free", "pairwise"),
        ("free", "balanced"),
        ("free by layers", "balanced"),
        ("nvlink", "off"),
        ("nvlink", "pairwise"),
        ("nvlink", "balanced"),
        ("network", "off"),
        ("network", "pairwise"),
        ("network", "balanced"),
    )
    text = []
    for share in SHARES:
        text += [
            f"**Attention {share:.0%} of the forward**",
            "",
            f"| {' | '.join(HEADING)} |",
            "|---" * len(HEADING) + "|",
        ]
        for shape in SHAPES:
            cells = [found[(*shape, share, *column)] for column in columns]
            pairwise, balanced = found[(*shape, share, "free", "pairwise")], found[(*shape, share, "free", "balanced")]
            values = [", ".join(map(str, shape)), f"{pairwise['formula']:.1%}"]
            values += [f"{cell['idle_share']:.1%}" for cell in cells]
            values += [
                str(cells[-1]["slice_tokens"]),
                f"{pairwise['bytes_busiest_rank']:.2f} / {pairwise['bytes_bound']:.2f}",
                f"{balanced['bytes_busiest_rank']:.2f}",
            ]
            text.append("| " + " | ".join(values) + " |")
        text.append("")
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", action="store_true", help="print the tables of the rows that are there")
    parser.add_argument("--largest", type=int, default=64, help="ranks of the largest shape")
    options = parser.parse_args()
    if not options.tables:
        where = record.circumstances("python -m benchmarks.exchange_simulation")
        cases = [(shape, share) for shape in SHAPES if shape[0] <= options.largest for share in SHARES]
        RESULTS.unlink(missing_ok=True)
        with ProcessPoolExecutor() as pool:
            for found in pool.map(all_rows, cases):
                for row in found:
                    record.append(RESULTS, row | where)
                print("{p}, {n}, {v}, {m} at {attention_share}".format(**found[0]), flush=True)
    print(tables())


if __name__ == "__main__":
    main()
