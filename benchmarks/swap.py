"""Swap on one H200, in a plain training loop over Llama-8B-shaped layers: step time and peak memory.

    python -m benchmarks.swap                      # every case; rows in benchmarks/results/swap.jsonl
    python -m benchmarks.swap --only 64k           # cases whose name begins so
    python -m benchmarks.swap --tiny               # any machine: the same program, a few kilobytes

Cases: nothing moved (`plain`), 80 % of the saved bytes moved (`swap`), every layer recomputed (`recompute`), torch's
`save_on_cpu` with pinned memory; what the observer and the hooks cost where nothing moves, beside torch.profiler
(`overhead`); how far the equal-time estimate of logical layers is off (`estimates`). Medians of the last steps, each
timed with the device idle before and after it (`overhead`: means over five steps in a row); peaks by
torch.cuda.max_memory_allocated.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks import record
from slimpipe.swap import SwapManager, SwapSettings
from slimpipe.swap.logical_layers import estimate_error

RESULTS = Path(__file__).parent / "results" / "swap.jsonl"
GIB = 2**30


@dataclass(frozen=True)
class Shape:
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    intermediate: int = 14336


LLAMA_8B, TINY = Shape(), Shape(64, 4, 2, 128)


class Layer(nn.Module):
    """RMSNorm, grouped-query attention, RMSNorm, SwiGLU: plain PyTorch, nothing saved smartly."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, self.head = shape, shape.hidden // shape.heads
        self.norm1, self.norm2 = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
        self.qkv = nn.Linear(shape.hidden, (shape.heads + 2 * shape.kv_heads) * self.head, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.gate, self.up = (nn.Linear(shape.hidden, shape.intermediate, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x_BsH: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x_BsH)).unflatten(-1, (-1, self.head)).transpose(1, 2)
        q, k, v = qkv.split([self.shape.heads, self.shape.kv_heads, self.shape.kv_heads], 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x_BsH = x_BsH + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norm2(x_BsH)
        return x_BsH + self.down(F.silu(self.gate(y)) * self.up(y))


class Machine:
    """What differs between a GPU and --tiny on a CPU."""

    def __init__(self) -> None:
        self.cuda = torch.cuda.is_available()
        self.device = torch.device("cuda" if self.cuda else "cpu")
        self.dtype = torch.bfloat16 if self.cuda else torch.float32

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def restart_peak(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> float:
        return torch.cuda.max_memory_allocated() / GIB if self.cuda else 0.0

    def attention(self) -> AbstractContextManager[Any]:
        """cuDNN's, which is the fastest here, and has grouped queries."""
        if not self.cuda:
            return contextlib.nullcontext()
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True)


def timed_steps(
    machine: Machine,
    model: nn.Module,
    x: Tensor,
    steps: int,
    step: Callable[[], AbstractContextManager[Any]],
    run: Callable[[nn.Module, Tensor], Tensor],
) -> tuple[list[float], list[Tensor]]:
    """Seconds and loss of each step: forward, backward, and gradients dropped."""
    seconds, losses = [], []
    for _ in range(steps):
        machine.synchronize()
        begin = time.perf_counter()
        with step():
            loss = run(model, x).square().mean()
            loss.backward()
            for p in model.parameters():
                p.grad = None
        machine.synchronize()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.detach())
    return seconds, losses


def in_a_row(
    machine: Machine, model: nn.Module, x: Tensor, step: Callable[[], AbstractContextManager[Any]]
) -> tuple[float, float]:
    """Seconds a step, of five between which nothing waits for the device; and of them the host's own."""
    machine.synchronize()
    begin = time.perf_counter()
    for _ in range(5):
        with step():
            layer_by_layer(model, x).square().mean().backward()
            for p in model.parameters():
                p.grad = None
    host = time.perf_counter() - begin
    machine.synchronize()
    return (time.perf_counter() - begin) / 5, host / 5


def layer_by_layer(model: nn.Module, x: Tensor) -> Tensor:
    for layer in model.children():
        x = layer(x)
    return x


def recomputed(model: nn.Module, x: Tensor) -> Tensor:
    for layer in model.children():
        x = checkpoint(layer, x, use_reentrant=False)
    return x


def measure(machine: Machine, mode: str, tokens: int, layers: int, shape: Shape, host_budget: int) -> dict[str, Any]:
    torch.manual_seed(0)
    with machine.device:
        model = nn.Sequential(*(Layer(shape) for _ in range(layers))).to(machine.dtype)
        x = torch.randn(1, tokens, shape.hidden, dtype=machine.dtype)
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
    torch.manual_seed(0)
    with machine.device:
        model = nn.Sequential(*(Layer(shape) for _ in range(layers))).to(machine.dtype)
        x = torch.randn(1, tokens, shape.hidden, dtype=machine.dtype)
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


class Slices(nn.Module):
    """A layer over causal slices: each attends to all before it, so later ones take longer."""

    def __init__(self, shape: Shape, count: int = 8) -> None:
        super().__init__()
        self.layer, self.count = Layer(shape), count

    def forward(self, x_BSH: Tensor) -> Tensor:
        layer, shape, past, out = self.layer, self.layer.shape, [], []
        for x in x_BSH.chunk(self.count, 1):
            qkv = layer.qkv(layer.norm1(x)).unflatten(-1, (-1, layer.head)).transpose(1, 2)
            q, k, v = qkv.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
            past.append((k, v))
            keys, values = (torch.cat([pair[i] for pair in past], 2) for i in range(2))
            mixed = F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
            x = x + layer.out(mixed.transpose(1, 2).flatten(2))
            y = layer.norm2(x)
            out.append(x + layer.down(F.silu(layer.gate(y)) * layer.up(y)))
        return torch.cat(out, 1)


class Experts(nn.Module):
    """Eight experts with loads of 1 : 2 : ... : 8, behind the attention of a layer."""

    def __init__(self, shape: Shape, count: int = 8) -> None:
        super().__init__()
        self.attention = Layer(shape)
        self.up = nn.ModuleList(nn.Linear(shape.hidden, shape.intermediate // 4, bias=False) for _ in range(count))
        self.down = nn.ModuleList(nn.Linear(shape.intermediate // 4, shape.hidden, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        weights = list(range(1, len(self.up) + 1))
        sizes = [x.shape[1] * w // sum(weights) for w in weights[:-1]]
        parts = x.split([*sizes, x.shape[1] - sum(sizes)], 1)
        mixed = (d(F.silu(u(part))) for u, d, part in zip(self.up, self.down, parts, strict=True))
        return x + torch.cat(list(mixed), 1)


def estimates(machine: Machine, tokens: int, layers: int, shape: Shape) -> dict[str, Any]:
    """Error of the paper's equal-time estimate of logical layers, against device events: dense, slices, experts."""
    row: dict[str, Any] = {"case": "estimates", "tokens": tokens, "layers": layers}
    for name, kind in (("dense", Layer), ("slices", Slices), ("experts", Experts)):
        torch.manual_seed(0)
        with machine.device:
            model = nn.Sequential(*(kind(shape) for _ in range(layers))).to(machine.dtype)
            x = torch.randn(1, tokens, shape.hidden, dtype=machine.dtype)
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
        for mode in ("plain", "swap", "recompute", *(["save_on_cpu"] if name == "64k" else [])):
            found[f"{name}-{mode}"] = lambda machine, mode=mode, tokens=tokens, layers=layers: measure(
                machine, mode, tokens, layers, shape, host
            )
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
        except torch.OutOfMemoryError as error:
            row = {"case": name, "error": str(error).splitlines()[0]}
        rows.append({"name": name, **row, "took_s": time.perf_counter() - begin})
        machine.restart_peak()
        print(rows[-1], flush=True)
        if not arguments.tiny:
            record.append(arguments.output, rows[-1] | record.circumstances("python -m benchmarks.swap"))
    plain = {row["tokens"]: row["step_s"] for row in rows if row.get("case") == "plain"}
    for row in rows:
        if row.get("tokens") in plain and "step_s" in row:
            row["of_plain"] = row["step_s"] / plain[row["tokens"]]
    columns = {"name": "", "step_s": ".3f", "of_plain": ".3f", "peak_gib": ".1f", "moved_gib": ".1f"}
    columns |= {"stalled_ms": ".1f", "late_gib": ".1f", "manager_percent": ".2f", "profiler_percent": ".2f"}
    columns |= {f"{name}_error_percent": ".1f" for name in ("dense", "slices", "experts")}
    record.table(rows, columns, "layers of the Llama-8B shape, bf16, forward and backward, one GPU")


if __name__ == "__main__":
    main()
