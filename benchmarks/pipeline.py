"""A 16-layer model of the Llama-8B shape through the pipeline: MFU, memory against the formula, bubble.

    python -m benchmarks.pipeline                 # every case; rows in benchmarks/results/pipeline.jsonl
    python -m benchmarks.pipeline --only 64k-n16

A case that fails or runs out of time is recorded with its reason, and the next one starts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import jobs, kernel_trace, on_paper, record
from benchmarks.clocks import Clocks
from benchmarks.pipeline_cases import CASES, PROFILE
from slimpipe.config import Config
from slimpipe.parallel.mesh import Processes
from slimpipe.plan.flops import step_flops
from slimpipe.plan.hardware_file import load_hardware
from slimpipe.plan.memory import layer_bytes_per_token, microbatch_bytes
from slimpipe.plan.predict import predict
from slimpipe.plan.swap import host_link
from slimpipe.runtime.watchdog import Progress, Watchdog
from slimpipe.schedule.formulas import bubble_fraction
from slimpipe.train.collector import heap_set_aside
from slimpipe.train.session import Session
from slimpipe.train.step_metrics import StepMetrics

RESULTS = Path(__file__).parent / "results" / "pipeline.jsonl"
PREDICTIONS = RESULTS.with_name("pipeline_predictions.jsonl")
CALIBRATED = PROFILE.with_name("h200.yaml")
"""What `slimpipe calibrate` measured: for what the step should take. The cases' cost tests keep PROFILE's rates."""
PEAK_FLOPS = {"NVIDIA H200": 989e12}
GIB = 2**30

COLUMNS = {
    "case": "",
    "carrier": "",
    "collectives": "",
    "mfu": ".1%",
    "step_s": ".3f",
    "tokens_per_s": ",.0f",
    "bubble": ".1%",
    "bubble_formula": ".1%",
    "predicted_bubble": ".1%",
    "exchange_overlap": ".1%",
    "swap_exposed": ".1%",
    "kv_exposed": ".1%",
    "activation_gib": ".2f",
    "expected_gib": ".2f",
    "activation_error": "+.1%",
    "peak_gib_by_rank": "",
    "sm_mhz": ".0f",
    "power_w": ".0f",
    "loss": ".3f",
    "failed": "",
}


def config_of(case: dict[str, Any]) -> Config:
    """The case's run. `model` replaces keys of the 16-layer model, for a try on a CPU."""
    return Config.from_dict(
        {
            "model": {
                "layers": case["layers"],
                "hidden_size": 4096,
                "heads": 32,
                "kv_heads": 8,
                "intermediate_size": 14336,
                "vocab_size": 128256,
                "rope_theta": 500000.0,
                **case.get("model", {}),
            },
            "parallel": {
                "pp": case["ranks"],
                "carrier": case.get("carrier", "auto"),
                "collectives": case.get("collectives", "auto"),
                "nccl_ctas": case.get("ctas"),
            },
            "pipeline": {
                "schedule": "slimpipe",
                "slices": case["n"],
                "virtual_stages": case["v"],
                "vocab_parallel": case["vocab"],
                "exchange": case.get("exchange", "off"),
                "receives_ahead": case.get("ahead"),
                "hardware": case.get("hardware"),
            },
            "memory": {
                "recompute": case["recompute"],
                "swap": case.get("swap", "off"),
                "kv_swap": case.get("kv_swap", "auto"),
                "gpu_budget_gib": case.get("budget"),
            },
            "data": {"corpus": "python_stdlib", "sequence_length": case["length"]},
            "optim": {"lr": 1e-4, "warmup_steps": 1},
            "train": {
                "steps": case["steps"],
                "output": "unused",
                "global_batch": case["m"],
                "dtype": case.get("dtype", "bfloat16"),
                "device": case.get("device", "auto"),
                "attention": case.get("attention", "auto"),
                "weight_grad_slices": case.get("weight_grad_slices", 1),
                "watchdog_seconds": 90,
            },
        }
    )


def measure(config: Config, case: dict[str, Any], processes: Processes) -> dict[str, Any] | None:
    """One rank of one case; on rank 0 the row."""
    progress = Progress()
    session: Session | None = None
    watchdog = Watchdog(
        progress,
        90,
        processes.rank,
        processes.world,
        processes.store,
        lambda: session.device_doing() if session is not None else None,
    )
    started = time.perf_counter()
    session = Session(config, processes.carrier, progress)
    ready = time.perf_counter() - started
    on_gpu = processes.device.type == "cuda"
    held = torch.cuda.memory_allocated() if on_gpu else 0
    warm = surprises(on_gpu)
    generator = torch.Generator().manual_seed(0)
    rows, clocks = [], Clocks()
    if processes.rank == 0 and on_gpu:
        clocks.start()
    with heap_set_aside():  # as in a run
        for step in range(config.train.steps):
            tokens = torch.randint(config.model.vocab_size, (case["m"], case["length"] + 1), generator=generator)
            rows.append(session.train_step(tokens[:, :-1], tokens[:, 1:]))
            if processes.rank == 0:
                print(f"step {step}: {rows[-1]}", file=sys.stderr, flush=True)
    sampled = clocks.stop()
    mine = memory(config, session, held) if on_gpu else {"activation_gib": 0.0, "peak_gib": 0.0}
    mine |= {key: value - warm[key] for key, value in surprises(on_gpu).items()}
    if case.get("profile"):
        mine |= profile(session, tokens, processes.rank)
    everyone: list[Any] = [None] * processes.world
    dist.all_gather_object(everyone, mine)
    watchdog.stop()
    if processes.rank != 0:
        return None
    # The first step meets cold caches; the median leaves it out.
    later = rows[1:] or rows
    seconds = statistics.median(row.seconds for row in later)
    flops = step_flops(config.model, case["length"], case["m"])
    peak_flops = (PEAK_FLOPS.get(torch.cuda.get_device_name(), 989e12) if on_gpu else 1e12) * processes.world
    worst = max(everyone, key=lambda row: row["activation_gib"])
    return {
        "mfu": flops / seconds / peak_flops,
        "step_s": seconds,
        "step_s_all": [round(row.seconds, 4) for row in rows],
        "tokens_per_s": case["m"] * case["length"] / seconds,
        "bubble": statistics.median(row.bubble for row in later),
        "bubble_by_rank": [round(share, 4) for share in later[-1].bubble_by_rank],
        "bubble_formula": float(bubble_fraction(config.pipeline.schedule, session.shape)),
        **prediction(config, session),
        "waits": {kind: round(share, 4) for kind, share in later[-1].waits.items()},
        "attention_backend": session.engine.backend.name,
        "carriers": session.carriers,
        "ce_chunk": session.ce_chunk,
        "loss_first": rows[0].loss,
        "grad_norm_first": rows[0].grad_norm,
        "loss": rows[-1].loss,
        "grad_norm": rows[-1].grad_norm,
        "ready_s": round(ready, 1),
        **sampled,
        **exchanged(session, later[-1]),
        **swapped(session, later[-1], seconds),
        **worst,
        "peak_gib_by_rank": " ".join(f"{found['peak_gib']:.1f}" for found in everyone),
        "by_rank": everyone,
    }


def surprises(on_gpu: bool) -> dict[str, int]:
    """Counts so far of what a step should have none of: functions compiled, by torch's compiler or Triton, and memory
    asked of the driver."""
    allocations = torch.cuda.memory_stats().get("num_device_alloc", 0) if on_gpu else 0
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"] + triton_codes()
    return {"compiled": compiled, "device_allocs": allocations}


def triton_codes() -> int:
    """How many codes of slimpipe's own Triton kernels this process has."""
    found = [module for name, module in sys.modules.items() if name.startswith("slimpipe.kernels.triton.")]
    kernels = {
        id(value): value for module in found for value in vars(module).values() if hasattr(value, "device_caches")
    }
    return sum(len(codes) for kernel in kernels.values() for codes, *_ in kernel.device_caches.values())


def prediction(config: Config, session: Session) -> dict[str, float]:
    """The step on paper: GEMMs, attention, what of both is recomputed, transfers, norms, copies to the host.

    No optimizer or launches.
    """
    hardware = load_hardware(CALIBRATED)
    host = session.planned.host_links(host_link(hardware))
    timeline = predict(config, session.plan, session.exchange, hardware, host)
    return {"predicted_s": timeline.makespan, "predicted_bubble": timeline.bubble_fraction}


def swapped(session: Session, row: StepMetrics, seconds: float) -> dict[str, Any]:
    """The swaps of one step, where there are any."""
    planned, row_ = session.planned, row.swap
    if row_ is None:
        return {}
    found: dict[str, Any] = {
        "swap_exposed": row_.exposed_s / seconds,
        "swap_pinned_gib": [round(bytes / GIB, 2) for bytes in row_.pinned_bytes],
        **{f"swap_{key}": getattr(row_, key) for key in ("exposed_s", "exposed_out_s", "exposed_back_s")},
    }
    swap = planned.swap
    if swap is not None:
        measured, predicted = sum(session.swap_bytes), sum(swap.bytes.movable[session.rank])
        found |= {
            "swap_waits_predicted_s": max(planned.swap_waits),
            "swap_out_gib": [round(bytes / GIB, 2) for bytes in row_.out_bytes],
            "swap_kept_gib": [round(bytes / GIB, 2) for bytes in row_.kept_bytes],
            "swap_units": [len(trips) for trips in swap.trips],
            "swap_fits": swap.fits,
            "swap_unit_error": measured / predicted - 1 if measured and predicted else 0.0,
        }
    if planned.kv is not None:
        found |= {
            "kv_streams": list(planned.kv.ranks),
            "kv_exposed": row_.exposed_kv_s / seconds,
            "kv_exposed_s": row_.exposed_kv_s,
            "kv_waits_predicted_s": max(planned.kv_waits),
            "kv_out_gib": [round(bytes / GIB, 2) for bytes in row_.kv_out_bytes],
            "kv_in_gib": [round(bytes / GIB, 2) for bytes in row_.kv_back_bytes],
        }
    return found


def exchanged(session: Session, row: StepMetrics) -> dict[str, Any]:
    """The exchange of one step, where there is one."""
    if session.exchange is None or row.exchange is None:
        return {}
    found = asdict(row.exchange)
    return {
        "loans": len(session.exchange.loans),
        "sent_gib": round(sum(found.pop("sent_bytes")) / GIB, 2),
        "received_gib": round(sum(found.pop("received_bytes")) / GIB, 2),
        **{f"exchange_{key}": value for key, value in found.items()},
    }


def profile(session: Session, tokens: torch.Tensor, rank: int) -> dict[str, Any]:
    """One more step under torch's profiler: this rank's kernels (`kernel_trace.summary`); rank 0 prints the longest."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as found:
        session.train_step(tokens[:, :-1], tokens[:, 1:])
    rows = [event for event in found.key_averages() if event.device_type.name == "CUDA"]
    rows.sort(key=lambda event: -event.self_device_time_total)
    if rank == 0:
        for event in rows[:40]:
            print(
                f"PROFILE {event.self_device_time_total / 1e3:9.2f} ms {event.count:6d} x {event.key[:110]}", flush=True
            )
    return kernel_trace.summary(kernel_trace.recorded(found))


def memory(config: Config, session: Session, held: int) -> dict[str, Any]:
    """Measured activation memory of this rank, K and V included, and what the formula says, in GiB.

    `held` is what was allocated between steps: weights, gradients, optimizer, KV slots with their dK, dV. Measured is
    the step's peak over that, plus the slots' K and V (the formula counts them).
    """
    shape, model, tokens = session.shape, config.model, config.data.sequence_length * config.train.micro_batch
    peak = torch.cuda.max_memory_allocated()
    terms = session.footprint.terms
    kv, dkv = terms["KV slots"], terms["dK, dV"]
    whole = microbatch_bytes(model, config.memory.recompute, tokens)
    layers = sum(len(stage.layers) for stage in session.stages)
    unit = whole * layers / model.layers / shape.v / shape.n
    expected = unit * session.peak_units
    if session.planned.moves:
        expected = terms["activations"] + kv
    measured = peak - held + kv
    # What a block keeps outside the slots, as the warm-up counted it, against the formula.
    kept = layer_bytes_per_token(model, config.memory.recompute)
    block = (sum(kept.values()) - kept["k, v"]) * tokens // shape.n
    return {
        "activation_gib": measured / GIB,
        "expected_gib": expected / GIB,
        "activation_error": measured / expected - 1,
        "peak_units": session.peak_units,
        "unit_error": session.unit_bytes / (block * max(len(stage.layers) for stage in session.stages)) - 1,
        "kv_gib": kv / GIB,
        "dkv_gib": dkv / GIB,
        "held_gib": held / GIB,
        "footprint_gib": session.footprint.total / GIB,
        "footprint_error": (peak + session.shared_bytes) / session.footprint.total - 1,
        "peak_gib": (peak + session.shared_bytes) / GIB,
        "shared_gib": session.shared_bytes / GIB,
    }


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="*", choices=CASES, help="cases to run (default: all)")
    parser.add_argument("--predict", action="store_true", help="what cases take on paper, on no GPU")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--profile", action="store_true", help="print the kernels of one more step, by total time")
    parser.add_argument(
        "--carrier",
        nargs="+",
        choices=["nccl", "symmetric"],
        default=["nccl"],
        help="parallel.carrier; every case with each",
    )
    parser.add_argument(
        "--collectives",
        nargs="+",
        choices=["nccl", "symmetric"],
        default=["nccl"],
        help="parallel.collectives; `symmetric` only with carrier symmetric; `auto` in older rows is NCCL",
    )
    parser.add_argument("--limit", type=int, default=150, help="seconds a case")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser


def main() -> None:
    options = arguments().parse_args()
    if options.worker is not None:
        jobs.work(options.worker, config_of, measure)
        return
    shared = {"ranks": options.ranks, "layers": options.layers, "steps": options.steps, "profile": options.profile}
    cases = [
        (name, CASES[name] | shared | {"carrier": carrier, "collectives": collectives})
        for name in options.only or CASES
        for carrier in options.carrier
        for collectives in options.collectives
        if collectives != "symmetric" or carrier == "symmetric"
    ]
    if options.predict:
        for name, case in cases:
            command = f"python -m benchmarks.pipeline --predict --only {name}"
            found = on_paper.row(config_of(case), load_hardware(CALIBRATED))
            print(f"{name}: {found}", flush=True)
            record.append(PREDICTIONS, {"case": name, **found, **record.circumstances(command)})
        return
    rows = []
    found = jobs.run("benchmarks.pipeline", cases, options.ranks, options.limit)
    for (name, case), (_, row) in zip(cases, found, strict=True):
        layout = "" if options.ranks == 2 else f" --ranks {options.ranks}"
        layout += "".join(f" --{key} {case[key]}" for key in ("carrier", "collectives") if case[key] != "nccl")
        command = f"python -m benchmarks.pipeline --only {name} --steps {options.steps}{layout}"
        rows.append({"case": name, **case, **row, **record.circumstances(command)})
        record.append(options.results, rows[-1])
    record.table(rows, COLUMNS, "16 layers of Llama-8B shape, bf16, forward + backward + optimizer")


if __name__ == "__main__":
    main()
