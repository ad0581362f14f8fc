"""How short a slice may be before the GPU waits for the host: one GPU, the same sequence in ever more slices.

    python -m benchmarks.host_overhead            # rows in benchmarks/results/host_overhead.jsonl; about two minutes

Nothing is sent here, so time in which no kernel runs is the host's: launches that come too late. `compute_s`: the time
in which some kernel ran, from a profiled step; `busy`: its share of a step without the profiler, which slows the host;
`launch_us`: the step over its kernels, which is what a launch costs the host once `busy` has fallen. `--sample` prints
where the host is, line by line, once a millisecond of every step.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks import jobs, record
from benchmarks.host_samples import HostSamples
from benchmarks.pipeline import config_of, measure
from slimpipe.config import Config
from slimpipe.parallel.mesh import Processes

RESULTS = Path(__file__).parent / "results" / "host_overhead.jsonl"
LENGTH, LAYERS = 32768, 4
SLICES = (4, 8, 16, 32, 64, 128)
PROFILED = 16
"""Slices up to which a step is profiled too."""
COLUMNS = {
    "case": "",
    "s": ",",
    "step_s": ".3f",
    "compute_s": ".3f",
    "busy": ".1%",
    "launches": ",",
    "launch_us": ".1f",
}
COLUMNS |= {"failed": ""}


def cases(length: int, layers: int, **more: Any) -> dict[str, jobs.Case]:
    shared = {"ranks": 1, "layers": layers, "length": length, "m": 1, "v": 1, "recompute": "norms", "vocab": False}
    # Sorting a profile of many short kernels takes minutes: there the time of a step alone must tell.
    return {f"s{length // n}": {**shared, "n": n, "steps": 3, "profile": n <= PROFILED, **more} for n in SLICES}


def measure_one(config: Config, case: jobs.Case, processes: Processes) -> dict[str, Any] | None:
    if not case.get("sample"):
        return measure(config, case, processes)
    with HostSamples("train_step") as samples:
        found = measure(config, case, processes)
    for line in samples.table().splitlines():
        print(f"PROFILE {line}", flush=True)
    return found


def row(case: jobs.Case, found: dict[str, Any]) -> dict[str, Any]:
    """What the table shows of a case. A kernel can take longer under the profiler: `busy` is cut at one."""
    row = {"s": case["length"] // case["n"], **found}
    if "by_rank" in found and found["by_rank"][0].get("launches"):
        mine = found["by_rank"][0]
        row |= {
            "compute_s": mine["compute_s"],
            "launches": mine["launches"],
            "busy": min(1.0, mine["compute_s"] / found["step_s"]),
            "launch_us": 1e6 * found["step_s"] / mine["launches"],
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, default=90, help="seconds a case")
    parser.add_argument("--only", nargs="*", help="cases such as s512")
    parser.add_argument("--sample", action="store_true", help="print where the host is; times are longer then")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.worker is not None:
        jobs.work(options.worker, config_of, measure_one)
        return
    rows = []
    more = {"sample": True} if options.sample else {}
    todo = {name: case for name, case in cases(LENGTH, LAYERS, **more).items() if name in (options.only or [name])}
    for name, found in jobs.run("benchmarks.host_overhead", list(todo.items()), 1, options.limit):
        command = "python -m benchmarks.host_overhead"
        rows.append({"case": name, **todo[name], **row(todo[name], found), **record.circumstances(command)})
        record.append(options.results, rows[-1])
    record.table(rows, COLUMNS, f"{LENGTH:,} tokens, {LAYERS} layers of Llama-8B shape on one GPU")


if __name__ == "__main__":
    main()
