"""Four or eight GPUs of one host: memory against p, the exchange's modes, MFU against n. 16 layers of Llama-8B shape.

    python -m benchmarks.scale --predict          # what the simulator says, on no GPU: results/scale_predictions.jsonl
    python -m benchmarks.scale                    # every case that this machine's GPUs allow: results/scale.jsonl

Resumable: a case that has a row of the same commit's results file already is passed over (`--again` runs it again), and
each case has its own time limit. Parts: `memory` (SlimPipe paper, Fig. 10), `exchange`,
`slices` (Fig. 11), `vocabulary`.

    python -m benchmarks.scale --table            # the results so far beside what the calibrated profile predicts

    python -m benchmarks.scale --part memory --host --reduced      # several processes on one GPU, a smaller model:
                                                                   # memory is exact there, time means nothing
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks import jobs, record
from benchmarks.pipeline import CALIBRATED, PROFILE, config_of, measure
from slimpipe.plan.flops import step_flops
from slimpipe.plan.hardware_file import load_hardware
from slimpipe.plan.predict import predict
from slimpipe.schedule.formulas import bubble_fraction
from slimpipe.train.planning import make_plan

FOLDER = Path(__file__).parent / "results"
RESULTS, PREDICTIONS = FOLDER / "scale.jsonl", FOLDER / "scale_predictions.jsonl"
KIB, PEAK = 1024, 989e12
MODES = ("off", "pairwise", "balanced")
COLUMNS = {
    "case": "",
    "mfu": ".1%",
    "predicted_mfu": ".1%",
    "step_s": ".3f",
    "predicted_s": ".3f",
    "bubble": ".1%",
    "predicted_bubble": ".1%",
    "bubble_formula": ".1%",
    "exchange_exposed_s": ".3f",
    "exchange_overlap": ".1%",
    "activation_gib": ".2f",
    "expected_gib": ".2f",
    "activation_error": "+.1%",
    "peak_gib_by_rank": "",
    "failed": "",
}


def _case(p: int, n: int, kib: int, steps: int, exchange: str = "off", **more: Any) -> jobs.Case:
    return {
        "ranks": p,
        "layers": 16,
        "length": kib * KIB,
        "m": 2,
        "n": n,
        "v": 1,
        "recompute": "norms",
        "vocab": True,
        "exchange": exchange,
        "steps": steps,
        # Loans are those that pay at NCCL's rates.
        **({"hardware": f"configs/hardware/{PROFILE.name}"} if exchange != "off" else {}),
        **more,
    }


def cases(part: str) -> dict[str, jobs.Case]:
    """A part's cases by name."""
    if part == "memory":
        return {f"memory-p{p}-{kib}k": _case(p, 4 * p, kib, 1) for p in (2, 4, 8) for kib in (32, 64, 96)}
    if part == "vocabulary":  # beside exchange-p*-n*-64k-off: the same with embedding and output layer on one rank each
        # Receives where they are needed, as there: without passes the default is two actions ahead.
        return {
            f"vocabulary-p{p}-n{4 * p}-64k-whole-ahead0": _case(p, 4 * p, 64, 3, vocab=False, ahead=0) for p in (4, 8)
        }
    if part == "exchange":
        return {
            f"exchange-p{p}-n{n}-{kib}k-{mode}": _case(p, n, kib, 3 if kib == 64 else 2, mode)
            for p in (4, 8)
            for kib in (64, 128)
            for n in (2 * p, 4 * p)
            for mode in MODES
        }
    return {
        f"slices-p{p}-n{n}-64k-{mode}": _case(p, n, 64, 3, mode)
        for p in (4, 8)
        for n in (p, 2 * p, 4 * p, 8 * p)
        for mode in ("off", "balanced")
        if n not in (2 * p, 4 * p)  # part `exchange` has those
    }


PARTS = ("memory", "exchange", "slices", "vocabulary")


def reduced(case: jobs.Case) -> jobs.Case:
    """A model whose p = 8 fits on one GPU, by way of host memory: half the tokens, a quarter of the width."""
    model = {"hidden_size": 1024, "heads": 8, "kv_heads": 2, "intermediate_size": 3584, "vocab_size": 32064}
    return case | {"length": case["length"] // 2, "model": model, "carrier": "host"}


def prediction(name: str, case: jobs.Case) -> dict[str, Any]:
    """The case on paper: NCCL's rates beside compute; no norms, optimizer or launches."""
    config = config_of(case)
    planned = make_plan(config)
    timeline = predict(config, planned.plan, planned.exchange, load_hardware(PROFILE))
    seconds = timeline.makespan
    return {
        "case": name,
        **case,
        "predicted_s": seconds,
        "predicted_mfu": step_flops(config.model, case["length"], case["m"]) / seconds / (PEAK * case["ranks"]),
        "predicted_bubble": timeline.bubble_fraction,
        "bubble_formula": float(bubble_fraction(config.pipeline.schedule, config.shape)),
        "loans": 0 if planned.exchange is None else len(planned.exchange.loans),
    }


def done(path: Path) -> set[str]:
    """Names of the cases that have a row without a failure."""
    if not path.exists():
        return set()
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["case"] for row in rows if not row.get("failed")}


def tables(path: Path) -> str:
    """The results as Markdown: the last row of each case, failures with their reason."""
    rows = {row["case"]: row for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())}
    lines = ["| case | rank: activations measured / by formula GiB | peak measured / predicted GiB |", "|---|---|---|"]
    timed = [
        "| case | step s | predicted s | MFU | idle by rank | mean | predicted | exposed s | overlap | moved GiB |"
    ]
    timed.append("|---|---|---|---|---|---|---|---|---|---|")
    known = load_hardware(CALIBRATED)
    for name, row in sorted(rows.items()):
        if row.get("failed"):
            lines.append(f"| {name} | {row['failed']} | |")
            continue
        ranks = row["by_rank"]
        held = [
            f"{rank}: {found['activation_gib']:.2f} / {found['expected_gib']:.2f}" for rank, found in enumerate(ranks)
        ]
        peaks = [
            f"{found['peak_gib']:.1f} / {found['footprint_gib']:.1f}" for found in ranks if "footprint_gib" in found
        ]
        lines.append(f"| {name} | {', '.join(held)} | {', '.join(peaks) or row['peak_gib_by_rank']} |")
        config = config_of(row)
        planned = make_plan(config)
        paper = predict(config, planned.plan, planned.exchange, known)
        idle = " ".join(f"{share:.1%}" for share in row["bubble_by_rank"])
        exposed, overlap, moved = (row.get(key) for key in ("exchange_exposed_s", "exchange_overlap", "sent_gib"))
        loaned = "- | - | -" if exposed is None else f"{exposed:.2f} | {overlap:.1%} | {moved:.1f}"
        timed.append(
            f"| {name} | {row['step_s']:.3f} | {paper.makespan:.3f} | {row['mfu']:.1%} | {idle} | "
            f"{row['bubble']:.1%} | {paper.bubble_fraction:.1%} | {loaned} |"
        )
    return "\n".join([*timed, "", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--part", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--only", nargs="*", help="names of cases")
    parser.add_argument("--predict", action="store_true", help="the simulator's numbers alone")
    parser.add_argument("--table", action="store_true", help="the results so far as Markdown, on no GPU")
    parser.add_argument("--host", action="store_true", help="several processes share a GPU, by way of host memory")
    parser.add_argument("--reduced", action="store_true", help="a smaller model and half the tokens")
    parser.add_argument("--limit", type=int, default=120, help="seconds a case")
    parser.add_argument("--again", action="store_true", help="cases that have a row too")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    if options.worker is not None:
        jobs.work(options.worker, config_of, measure)
        return
    if options.table:
        print(tables(options.results or RESULTS))
        return
    wanted = {name: case for part in options.part for name, case in cases(part).items()}
    if options.only:
        wanted = {name: wanted[name] for name in options.only}
    rows: list[dict[str, Any]] = []
    if options.predict:
        for name, case in wanted.items():
            if not name.startswith("memory"):
                command = "python -m benchmarks.scale --predict"
                rows.append(prediction(name, case) | record.circumstances(command))
                record.append(options.results or PREDICTIONS, rows[-1])
                print(f"{name}: {rows[-1]['predicted_s']:.3f} s", flush=True)
        record.table(rows, {key: spec for key, spec in COLUMNS.items() if any(key in row for row in rows)}, "Predicted")
        return
    if options.reduced:
        wanted = {f"{name}-reduced": reduced(case) for name, case in wanted.items()}
    path = options.results or RESULTS
    gpus = torch.cuda.device_count()
    known = set() if options.again else done(path)
    for p in sorted({case["ranks"] for case in wanted.values()}):
        todo = [(name, case) for name, case in wanted.items() if case["ranks"] == p and name not in known]
        if p > gpus and not options.host:
            print(f"{len(todo)} cases need {p} GPUs, here are {gpus}: not run", flush=True)
            continue
        for name, found in jobs.run("benchmarks.scale", todo, p, options.limit):
            command = f"python -m benchmarks.scale --only {name.removesuffix('-reduced')}"
            command += " --host" * options.host + " --reduced" * options.reduced
            rows.append({"case": name, **dict(todo)[name], **found, **record.circumstances(command)})
            record.append(path, rows[-1])
            said = found.get("failed") or f"{found['step_s']:.3f} s, MFU {found['mfu']:.1%}"
            print(f"{name}: {said}", flush=True)
    record.table(rows, COLUMNS, "16 layers of Llama-8B shape, bf16, forward + backward + optimizer")


if __name__ == "__main__":
    main()
