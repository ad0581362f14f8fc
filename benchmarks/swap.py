"""Swap on one H200, in a plain training loop over Llama-8B-shaped layers: step time and peak memory.

    python -m benchmarks.swap                      # every case; rows in benchmarks/results/swap.jsonl
    python -m benchmarks.swap --only 64k           # cases whose name begins so
    python -m benchmarks.swap --tiny               # any machine: the same program, a few kilobytes

Cases: nothing moved (`plain`), 80 % of the saved bytes moved (`swap`), every layer recomputed (`recompute`), torch's
`save_on_cpu` with pinned memory; what the observer and the hooks cost where nothing moves, beside torch.profiler
(`overhead`); how far the equal-time estimate of logical layers is off (`estimates`); four times what fits under a cap
(`capped`) and the peak of full recompute (`equal-peak`), both of benchmarks/swap_budget.py; two other ways to move
activations, where they are installed (`torchtune`, `megatron`: benchmarks/swap_peers.py). Medians of the last steps,
each timed with the device idle before and after it (`overhead`: means over five steps in a row); peaks by
torch.cuda.max_memory_allocated.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from benchmarks import record, swap_peers
from benchmarks.swap_budget import capped, equal_peak
from benchmarks.swap_model import (
    GIB,
    LLAMA_8B,
    TINY,
    Experts,
    Layer,
    Machine,
    Shape,
    Slices,
    hidden,
    in_a_row,
    layer_by_layer,
    make,
    recomputed,
    timed_steps,
)
from benchmarks.swap_peers import Missing
from slimpipe.swap import SwapManager, SwapSettings
from slimpipe.swap.logical_layers import estimate_error

RESULTS = Path(__file__).parent / "results" / "swap.jsonl"
CAP_TINY = 8 << 20
PEERS = {"torchtune": swap_peers.torchtune, "megatron": swap_peers.megatron}


def measure(machine: Machine, mode: str, tokens: int, layers: int, shape: Shape, host_budget: int) -> dict[str, Any]:
    model, x = make(machine, Layer, shape, layers), hidden(machine, shape, 1, tokens)
    machine.restart_peak()
    row: dict[str, Any] = {"case": mode, "tokens": tokens, "layers": layers}
    manager = None
    with machine.attention():
        if mode == "swap":
            settings = SwapSettings(move_share=0.8, policies=1, **({} if machine.cuda else {"min_bytes": 1024}))
            manager = SwapManager(None, host_budget, machine.device, settings)
            # Two of warm-up, the profile, one in which kernels and pools settle.
            warm, _ = timed_steps(machine, model, x, 4, manager.step, layer_by_layer)
            machine.restart_peak()
            stalled = manager.stalled
            seconds, losses = timed_steps(machine, model, x, 3, manager.step, layer_by_layer)
            moved = sum(known.plan.moved_bytes for known in manager.stages.known if known.plan is not None)
            row |= {
                "profiled_step_s": warm[2],
                "moved_gib": moved / GIB,
                "stalled_ms": 1e3 * (manager.stalled - stalled) / 3,
                "late_gib": manager.counts.fetched_late / GIB,
                "planned_stall_ms": 1e3 * manager.policies[0].stalled if manager.policies else 0.0,
                "estimate_error_percent": 100 * estimate_error(manager.layers),
                "link_gb_s": [rate / 1e9 for rate in manager.streams.rates()],
            }
        else:
            step: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
            if mode == "save_on_cpu":
                step = lambda: torch.autograd.graph.save_on_cpu(pin_memory=machine.cuda)  # noqa: E731
            run = recomputed if mode == "recompute" else layer_by_layer
            if mode in PEERS:
                step, run = PEERS[mode](machine)
            timed_steps(machine, model, x, 1, step, run)
            machine.restart_peak()
            seconds, losses = timed_steps(machine, model, x, 2, step, run)
    row |= {"step_s": statistics.median(seconds), "peak_gib": machine.peak_gib(), "loss": float(losses[-1])}
    if manager is not None:
        print(manager.summary(), manager.layer_table(), sep="\n", flush=True)
    return row


def overhead(machine: Machine, tokens: int, layers: int, shape: Shape) -> dict[str, Any]:
    """Steps with nothing to move: plainly, under the manager's steady state, under torch.profiler.

    In turn, since clocks drift (a GPU at its power limit by 3 % within seconds): medians of each round's ratios. Host
    times tell more: as long as the host is ahead of the device, what it does costs nothing.
    """
    model, x = make(machine, Layer, shape, layers), hidden(machine, shape, 1, tokens)
    manager = SwapManager(None, 1 << 30, machine.device)
    rounds: list[dict[str, tuple[float, float]]] = []
    with machine.attention():
        timed_steps(machine, model, x, 20, manager.step, layer_by_layer)
        for i in range(12):
            found = {"plain": in_a_row(machine, model, x, contextlib.nullcontext)}
            found["manager"] = in_a_row(machine, model, x, manager.step)
            if i < 3:  # what it has found takes it seconds to sort
                with torch.profiler.profile():
                    found["profiler"] = in_a_row(machine, model, x, contextlib.nullcontext)
            found["again"] = in_a_row(machine, model, x, contextlib.nullcontext)
            rounds.append(found)

    def more(name: str) -> float:
        """Percent over the plain steps before and behind it."""
        ratios = [2 * r[name][0] / (r["plain"][0] + r["again"][0]) for r in rounds if name in r]
        return 100 * (statistics.median(ratios) - 1)

    def host(name: str) -> float:
        return 1e3 * statistics.median(r[name][1] for r in rounds if name in r)

    return {
        "case": "overhead",
        "tokens": tokens,
        "layers": layers,
        "step_s": statistics.median(r["plain"][0] for r in rounds),
        "manager_percent": more("manager"),
        "profiler_percent": more("profiler"),
        "again_percent": 100 * statistics.median(r["again"][0] / r["plain"][0] - 1 for r in rounds),
        **{f"{name}_host_ms": host(name) for name in ("plain", "manager", "profiler")},
        "observer": manager.observer.name,
        "stage": manager.stage.value,
    }


def estimates(machine: Machine, tokens: int, layers: int, shape: Shape) -> dict[str, Any]:
    """Error of the paper's equal-time estimate of logical layers, against device events: dense, slices, experts."""
    row: dict[str, Any] = {"case": "estimates", "tokens": tokens, "layers": layers}
    for name, kind in (("dense", Layer), ("slices", Slices), ("experts", Experts)):
        model, x = make(machine, kind, shape, layers), hidden(machine, shape, 1, tokens)
        manager = SwapManager(None, 1 << 30, machine.device)
        timed_steps(machine, model, x, 4, manager.step, layer_by_layer)
        row[f"{name}_error_percent"] = 100 * estimate_error(manager.layers)
        row[f"{name}_logical_layers"] = len(manager.layers)
    return row


def cases(tiny: bool) -> dict[str, Callable[[Machine], dict[str, Any]]]:
    shape, host = (TINY, 64 << 20) if tiny else (LLAMA_8B, 96 * GIB)
    lengths = {"64k": (256, 4), "128k": (512, 3)} if tiny else {"64k": (65536, 4), "128k": (131072, 4)}
    found: dict[str, Callable[[Machine], dict[str, Any]]] = {}
    for name, (tokens, layers) in lengths.items():
        for mode in ("plain", "swap", "recompute", *(["save_on_cpu", *PEERS] if name == "64k" else [])):
            found[f"{name}-{mode}"] = lambda machine, mode=mode, tokens=tokens, layers=layers: measure(
                machine, mode, tokens, layers, shape, host
            )
    for what in ("sequence", "batch"):
        cap, multiple = (CAP_TINY, 16) if tiny else (16 * GIB, 256)
        found[f"capped-{what}"] = lambda machine, what=what, cap=cap, multiple=multiple: capped(
            machine, what, cap, 12, shape, host, multiple
        )
    found["equal-peak"] = lambda machine: equal_peak(machine, 256 if tiny else 131072, 3, shape, host)
    found["overhead"] = lambda machine: overhead(machine, 256 if tiny else 8192, 4, shape)
    found["estimates"] = lambda machine: estimates(machine, 256 if tiny else 16384, 4, shape)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[""], help="beginnings of case names")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    machine, rows = Machine(), []
    for name, case in cases(arguments.tiny).items():
        if not name.startswith(tuple(arguments.only)):
            continue
        begin = time.perf_counter()
        try:
            row = case(machine)
        except (Missing, torch.OutOfMemoryError) as error:
            row = {"case": name, "error": str(error).splitlines()[0]}
        except Exception as error:
            if not name.endswith(tuple(PEERS)):
                raise
            row = {"case": name, "error": f"{type(error).__name__}: {error}".splitlines()[0]}
        rows.append({"name": name, **row, "took_s": time.perf_counter() - begin})
        machine.restart_peak()
        print(rows[-1], flush=True)
        if not arguments.tiny:
            record.append(arguments.output, rows[-1] | record.circumstances("python -m benchmarks.swap"))
    plain = {(row["tokens"], row["layers"]): row["step_s"] for row in rows if row.get("case") == "plain"}
    for row in rows:
        like = (row.get("tokens"), row.get("layers"))
        if like in plain and "step_s" in row:
            row.setdefault("of_plain", row["step_s"] / plain[like])
    columns = {"name": "", "step_s": ".3f", "of_plain": ".3f", "peak_gib": ".1f", "moved_gib": ".1f"}
    columns |= {"cap_gib": ".1f", "fits_tokens": "d", "faster": ".2f"}
    columns |= {"stalled_ms": ".1f", "late_gib": ".1f", "manager_percent": ".2f", "profiler_percent": ".2f"}
    columns |= {f"{name}_error_percent": ".1f" for name in ("dense", "slices", "experts")}
    record.table(rows, columns, "layers of the Llama-8B shape, bf16, forward and backward, one GPU")


if __name__ == "__main__":
    main()
