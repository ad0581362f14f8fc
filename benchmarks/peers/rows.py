"""Rows of benchmarks/results/peers.jsonl: which stand for a system, and the table of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Place = tuple[int, int, str]
"""layers, length, link."""
SYSTEMS = ("slimpipe", "FSDP2 + CP", "megatron interleaved", "megatron 1F1B", "torch interleaved", "torch 1F1B")


def read(path: Path) -> list[Row]:
    """The latest row of every case."""
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return list({row["case"]: row for row in rows}.values())


def finished(row: Row) -> bool:
    """A result that another run would not change: numbers, or too little memory; not a time limit or an accident."""
    return not row.get("failed") or bool(row.get("out_of_memory"))


def out_of_memory(reason: str) -> bool:
    return any(word in reason for word in ("OutOfMemory", "out of memory", "ALLOC_FAILED"))


def hopeless(case: Row, rows: Sequence[Row]) -> str | None:
    """Why the case need not run: the same setting had too little memory at this length or a shorter one."""
    for row in rows:
        same = all(row[key] == case[key] for key in ("system", "setting", "layers", "link"))
        if same and row.get("out_of_memory") and row["length"] <= case["length"] and row["m"] <= case["m"]:
            return f"not run: out of memory at {row['length'] // 1024}K already"
    return None


def timed(row: Row) -> bool:
    return not row.get("failed") and row["system"] != "link" and row["steps"] > 1


def best(rows: Sequence[Row]) -> dict[Place, dict[str, Row]]:
    """By place, every system's fastest row; where all its settings failed, a row that says why."""
    found: dict[Place, dict[str, Row]] = {}
    for row in rows:
        if row["system"] == "link" or (row["steps"] == 1):
            continue
        of = found.setdefault((row["layers"], row["length"], row["link"]), {})
        held = of.get(row["system"])
        if held is None or row.get("mfu", 0.0) > held.get("mfu", 0.0):
            of[row["system"]] = row
    return {place: found[place] for place in sorted(found)}


def longest(rows: Sequence[Row]) -> dict[str, tuple[int, str]]:
    """By system, the longest context in 16 layers over a fast link that a step was done at, and what stopped it."""
    mine = [row for row in rows if row["layers"] == 16 and row["link"] == "fast" and row["system"] != "link"]
    found = {}
    for system in dict.fromkeys(row["system"] for row in mine):
        done = max((row["length"] for row in mine if row["system"] == system and not row.get("failed")), default=0)
        over = [row for row in mine if row["system"] == system and row.get("failed") and row["length"] > done]
        over.sort(key=lambda row: (row["length"], not row.get("out_of_memory")))
        found[system] = done, reason(over[0]) if over else "not tried further"
    return found


def reason(row: Row) -> str:
    if row.get("out_of_memory"):
        return f"out of memory at {row['length'] // 1024}K"
    return f"at {row['length'] // 1024}K: {row['failed']}"


def markdown(rows: Sequence[Row]) -> str:
    """Tables ready for a README: every system's best at each place, and the longest contexts."""
    head = "| layers | S | m | link | system | setting | MFU | of the bound | s a step | peak GiB by rank | tried |"
    lines = [head, "|---|---|---|---|---|---|---|---|---|---|---|"]
    for (layers, length, link), systems in best(rows).items():
        for system in sorted(systems, key=lambda name: -systems[name].get("mfu", 0.0)):
            row = systems[system]
            alike = [
                one
                for one in rows
                if (one["layers"], one["length"], one["link"], one["system"]) == (layers, length, link, system)
                and one["steps"] > 1
            ]
            fits = sum(not one.get("failed") for one in alike)
            cells = [str(layers), f"{length // 1024}K", str(row["m"]), link, system, row["setting"]]
            if row.get("failed"):
                cells += ["-", "-", "-", "out of memory" if row.get("out_of_memory") else row["failed"]]
            else:
                cells += [f"{row['mfu']:.1%}", f"{row['bound_share']:.1%}", f"{row['step_s']:.2f}"]
                cells += [row["peak_gib_by_rank"]]
            lines.append("| " + " | ".join([*cells, f"{fits} of {len(alike)} ran"]) + " |")
    reached = longest(rows)
    if reached:
        lines += ["", "| system | longest context | beyond it |", "|---|---|---|"]
        for system, (length, why) in sorted(reached.items(), key=lambda item: -item[1][0]):
            lines.append(f"| {system} | {length // 1024}K | {why} |")
    return "\n".join(lines) + "\n"
