"""slimpipe and its peers in turn on the same GPUs: rows, table and plots. See the README beside this.

    python -m benchmarks.peers                      # all parts, the most telling cases first
    python -m benchmarks.peers --first --minutes 9  # one setting a system; ends before the tenth minute
    python -m benchmarks.peers --slow-link          # the two GPUs joined by TCP on the loopback address
    python -m benchmarks.peers --longest            # doubling the context from 16K until it fails
    python -m benchmarks.peers --list               # what would run, and about how long
    python -m benchmarks.peers --table              # table and plots from the rows that are there, on no GPU

It goes on where it stopped: a case with a result, out of memory too, is passed over (`--again` runs it once more).
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import jobs, record
from benchmarks.peers import plot, rows, systems
from benchmarks.peers.cases import LINK_PROFILE, PARTS, cases, expected_seconds
from benchmarks.peers.link import write_profile
from benchmarks.peers.measure import bound_seconds
from benchmarks.pipeline import PROFILE

RESULTS = Path(__file__).parents[1] / "results" / "peers.jsonl"
SLOW_LINK = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
"""NCCL's transports inside a host off: what is left is TCP."""
PEERS_ONLY = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""As their guides advise: less memory lost between blocks."""


def wanted(options: argparse.Namespace) -> list[tuple[str, jobs.Case]]:
    parts = options.part or [*["slow"] * options.slow_link, *["longest"] * options.longest] or PARTS
    found = [pair for part in parts for pair in cases(part, options.first)]
    return [pair for pair in found if not options.system or pair[1]["system"] in [*options.system, "link"]]


def needless(case: jobs.Case, known: list[rows.Row]) -> str | None:
    """Why a case would tell nothing new, by what is known of others."""
    reached = rows.longest(known).get(case["system"], (0, ""))[0]
    if case["steps"] == 1 and case["length"] <= reached:
        return f"{reached // 1024}K ran already"
    return rows.hopeless(case, known)


def run(todo: list[tuple[str, jobs.Case]], options: argparse.Namespace, known: list[rows.Row]) -> Iterator[rows.Row]:
    """Rows as they come. Neighbours of one system share a job."""
    end = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    for (system, link), group in itertools.groupby(todo, lambda pair: (pair[1]["system"], pair[1]["link"])):
        batch = []
        for name, case in group:
            why = needless(case, known)
            if why is None:
                batch.append((name, case))
            else:
                print(f"{name}: {why}", flush=True)
        if any(case.get("hardware") == LINK_PROFILE for _, case in batch):
            measured = [row for row in known if row["system"] == "link" and not row.get("failed")]
            if measured:
                write_profile(measured[-1], PROFILE, Path(LINK_PROFILE))
            else:
                batch = [pair for pair in batch if pair[1].get("hardware") != LINK_PROFILE]
        left = dict(batch)
        if left and time.monotonic() + expected_seconds(batch[0][1]) > end:
            print(f"{batch[0][0]}: no time left for it", flush=True)
            return
        limit = options.limit or max((60 + 2.5 * expected_seconds(case) for case in left.values()), default=0)
        environment = (SLOW_LINK if link == "slow" else {}) | (PEERS_ONLY if system not in ("slimpipe", "link") else {})
        for name, found in jobs.run("benchmarks.peers", batch, options.ranks, limit, environment):
            row = row_of(name, left.pop(name), found)
            known.append(row)
            yield row
            if not left:
                continue
            name, case = next(iter(left.items()))
            # A longer context of the same setting, or no time: the job is stopped.
            why = needless(case, known)
            if why is None and row["steps"] == 1 and row.get("failed"):
                why = "a shorter one failed"
            if why is None and time.monotonic() + expected_seconds(case) > end:
                why = "no time left for it"
            if why is not None:
                print(f"{name}: {why}", flush=True)
                break


def row_of(name: str, case: jobs.Case, found: dict[str, Any]) -> rows.Row:
    row = {"case": name, **case, **found, **record.circumstances("python -m benchmarks.peers")}
    if row.get("failed"):
        row["out_of_memory"] = rows.out_of_memory(row["failed"])
    elif case["system"] != "link":
        model = systems.config_of(case | {"hardware": None, "exchange": "off"}).model
        row["bound_s"] = bound_seconds(model, case["length"], case["m"], case["ranks"])
        row["bound_share"] = row["bound_s"] / row["step_s"]
    return row


def said(row: rows.Row) -> str:
    if row.get("failed"):
        return row["failed"]
    if row["system"] == "link":
        return f"{row['latency_us']:.0f} us, {row['gb_per_s']:.2f} GB/s"
    return f"{row['step_s']:.3f} s, MFU {row['mfu']:.1%}, loss {row['loss_first']:.4f}, {row['peak_gib_by_rank']} GiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--part", nargs="*", choices=PARTS, help="default: all, in this order")
    parser.add_argument("--slow-link", action="store_true", help="part slow")
    parser.add_argument("--longest", action="store_true", help="part longest")
    parser.add_argument("--system", nargs="*", choices=[one for one in systems.MODULES if one != "link"])
    parser.add_argument("--first", action="store_true", help="each system's first setting alone")
    parser.add_argument("--only", nargs="*", default=[""], metavar="TEXT", help="cases with one of these in their name")
    parser.add_argument("--minutes", type=float, help="begin no case that would end later")
    parser.add_argument("--limit", type=float, help="seconds a case (default: by its size)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="cases that have a result too")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where new rows go")
    options = parser.parse_args()
    if options.worker is not None:
        jobs.work(options.worker, systems.config_of, systems.run)
        return
    known = rows.read(RESULTS) + (rows.read(options.results) if options.results != RESULTS else [])
    done = set() if options.again else {row["case"] for row in known if rows.finished(row)}
    cases = [(name, case) for name, case in wanted(options) if any(text in name for text in options.only)]
    todo = [(name, case | {"ranks": options.ranks}) for name, case in cases if name not in done]
    if options.list:
        for name, case in todo:
            print(f"{expected_seconds(case):6.0f} s  {needless(case, known) or ''}  {name}")
        seconds = sum(expected_seconds(case) for _, case in todo if needless(case, known) is None)
        print(f"{seconds / 60:6.1f} minutes in all, at most")
        return
    if not options.table:
        if torch.cuda.device_count() < options.ranks:
            parser.error(f"--ranks = {options.ranks}: this machine has {torch.cuda.device_count()} GPUs")
        for row in run(todo, options, known):
            record.append(options.results, row)
            print(f"{row['case']}: {said(row)}", flush=True)
    latest = list({row["case"]: row for row in known}.values())
    print(rows.markdown(latest))
    for path in plot.write(latest, options.results.parent):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
