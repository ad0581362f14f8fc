"""The elementwise parts of a layer: plain, compiled, by Triton, by Liger-Kernel, and what memory alone would take.

    python -m benchmarks.fused            # one GPU, half a minute; rows in benchmarks/results/fused.jsonl

One slice of 4096 tokens at the Llama-8B shape, bf16. `least_us`: the bytes that must be read and written over the rate
of a large copy on the same GPU. Liger-Kernel where it is installed: its autograd Functions, on tensors laid out as it
wants them. Times are those of the kernels, by torch.profiler. `runs`: the form that a GPU runs (`ON_GPUS` in
slimpipe/kernels/fuse.py); `of_least` is that one's time over the least. `host_us`: what a call of it, its choice
included, costs the host, which launches ahead of the device as long as the device is busy; `compiled_host_us` and
`plain_host_us` for comparison.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import record
from slimpipe.kernels import cross_entropy, merge, norm, rope, sums, swiglu
from slimpipe.kernels.fuse import Fused

RESULTS = Path(__file__).parent / "results" / "fused.jsonl"
TOKENS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD, VOCAB = 4096, 4096, 14336, 32, 8, 128, 64128
IN_A_ROW = 20
COLUMNS = {"operation": "", "plain_us": ".0f", "compiled_us": ".0f", "triton_us": ".0f", "least_us": ".0f", "runs": ""}
COLUMNS |= {"of_least": ".2f", "plain_host_us": ".0f", "compiled_host_us": ".0f", "host_us": ".0f", "liger_us": ".0f"}
COLUMNS |= {"failed": ""}


@dataclass(frozen=True)
class Operation:
    """`form`: the fused function; `arguments`: what it is called with; `moved`: bytes it must read and write;
    `compiles`: whether the compiler is tried with it."""

    form: Fused[Any, Any]
    arguments: tuple[Any, ...]
    moved: int
    liger: Callable[[], Any] | None = None
    compiles: bool = True


def noise(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda")


def microseconds(work: Callable[[], Any]) -> float:
    """Of the device, a call: its kernels' times, whatever lies between them."""
    for _ in range(3):  # compiles
        work()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(IN_A_ROW):
            work()
        torch.cuda.synchronize()
    kernels = [event for event in found.key_averages() if event.device_type.name == "CUDA"]
    return sum(event.self_device_time_total for event in kernels) / IN_A_ROW


def host_microseconds(work: Callable[[], Any]) -> float:
    """Of the host, a call that has been compiled."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(IN_A_ROW):
        work()
    found = time.perf_counter() - begin
    torch.cuda.synchronize()
    return 1e6 * found / IN_A_ROW


def nbytes(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def operations() -> dict[str, Callable[[], Operation]]:
    """Made one by one: their tensors are up to a gigabyte."""

    def norm_forward() -> Operation:
        x, weight = noise(1, TOKENS, HIDDEN), noise(HIDDEN)
        liger = _liger("rms_norm.LigerRMSNormFunction", x, weight, 1e-5, 0.0, "llama", False)
        return Operation(norm.rms_norm_forward, (x, weight, 1e-5), 2 * nbytes(x), liger)

    def norm_backward() -> Operation:
        x, g, weight = noise(1, TOKENS, HIDDEN), noise(1, TOKENS, HIDDEN), noise(HIDDEN)
        rstd = noise(1, TOKENS, 1, dtype=torch.float32).abs()
        liger = _liger_backward("rms_norm.LigerRMSNormFunction", g, x, weight, 1e-5, 0.0, "llama", False)
        return Operation(norm.rms_norm_backward, (g, x, rstd, weight), 3 * nbytes(x), liger)

    def add_norm_forward() -> Operation:
        x, delta, weight = noise(1, TOKENS, HIDDEN), noise(1, TOKENS, HIDDEN), noise(HIDDEN)
        return Operation(norm.add_rms_norm_forward, (x, delta, weight, 1e-5), 4 * nbytes(x))

    def norm_and_residual_backward() -> Operation:
        x, g, beside, weight = *(noise(1, TOKENS, HIDDEN) for _ in range(3)), noise(HIDDEN)
        rstd = noise(1, TOKENS, 1, dtype=torch.float32).abs()
        return Operation(norm.rms_norm_backward, (g, x, rstd, weight, beside), 4 * nbytes(x))

    def swiglu_forward() -> Operation:
        both = noise(1, TOKENS, 2 * INTERMEDIATE)
        gate, up = noise(1, TOKENS, INTERMEDIATE), noise(1, TOKENS, INTERMEDIATE)
        return Operation(
            swiglu.swiglu_forward, (both,), nbytes(both) * 3 // 2, _liger("swiglu.LigerSiLUMulFunction", gate, up)
        )

    def swiglu_backward() -> Operation:
        both, g = noise(1, TOKENS, 2 * INTERMEDIATE), noise(1, TOKENS, INTERMEDIATE)
        gate, up = noise(1, TOKENS, INTERMEDIATE), noise(1, TOKENS, INTERMEDIATE)
        liger = _liger_backward("swiglu.LigerSiLUMulFunction", g, gate, up)
        return Operation(swiglu.swiglu_backward, (g, both), nbytes(g) + 2 * nbytes(both), liger, compiles=False)

    def swiglu_backward_into() -> Operation:
        """What runs inside of the other where the kernel by Triton does not."""
        both, g = noise(TOKENS, 2 * INTERMEDIATE), noise(TOKENS, INTERMEDIATE)
        halves = torch.empty_like(both).chunk(2, -1)
        return Operation(swiglu.swiglu_backward_into, (g, both, *halves), nbytes(g) + 2 * nbytes(both))

    def rotate() -> Operation:
        """Queries and keys in one tensor here; Liger takes them apart, heads first."""
        qkv, (cos, sin) = noise(1, TOKENS, HEADS + 2 * KV_HEADS, HEAD), angles()
        q, k = noise(1, HEADS, TOKENS, HEAD), noise(1, KV_HEADS, TOKENS, HEAD)
        tables = [table[:, 0].repeat(1, 2)[None].bfloat16() for table in (cos, sin)]
        liger = _liger("rope.LigerRopeFunction", q, k, *tables)
        return Operation(rope.rotate_heads, (qkv, cos, sin, (HEADS, KV_HEADS, KV_HEADS)), 2 * nbytes(q, k), liger)

    def rotate_back() -> Operation:
        """The gradient of values, which is copied, among them."""
        dq, dk, dv = (noise(1, TOKENS, heads, HEAD) for heads in (HEADS, KV_HEADS, KV_HEADS))
        return Operation(rope.rotate_heads_back, (dq, dk, dv, *angles()), 2 * nbytes(dq, dk, dv))

    def angles() -> tuple[Tensor, Tensor]:
        found = torch.arange(float(TOKENS), device="cuda")[:, None, None] * torch.rand(HEAD // 2, device="cuda")
        return found.cos(), found.sin()

    def norm_again() -> Operation:
        x, rstd, weight = noise(1, TOKENS, HIDDEN), noise(1, TOKENS, 1, dtype=torch.float32).abs(), noise(HIDDEN)
        return Operation(norm.rms_norm_again, (x, rstd, weight), 2 * nbytes(x))

    def merged(parts: int) -> Operation:
        outs = [noise(1, TOKENS, HEADS, HEAD) for _ in range(parts)]
        lses = [noise(1, HEADS, TOKENS, dtype=torch.float32) for _ in range(parts)]
        out = torch.empty_like(outs[0])
        return Operation(merge._merge_into, (outs, lses, out), nbytes(*outs, out))

    def summed(parts: int) -> Operation:
        grads = [noise(1, TOKENS, HEADS, HEAD) for _ in range(parts)]
        return Operation(sums.sum_into, (grads, torch.empty_like(grads[0])), (parts + 1) * nbytes(grads[0]))

    def added(tokens: int, to: str) -> Operation:
        """dK and dV of so many tokens: "stored" or "added" in fp32, or the sum "rounded"."""
        parts = noise(1, tokens, KV_HEADS, HEAD), noise(1, tokens, KV_HEADS, HEAD)
        accs = parts[0].float(), parts[1].float()
        outs = accs if to != "rounded" else (torch.empty_like(parts[0]), torch.empty_like(parts[1]))
        read = accs if to != "stored" else None
        return Operation(sums.add_pairs, (parts, read, outs), nbytes(*parts, *(read or ()), *outs))

    def statistics() -> Operation:
        logits, labels = noise(TOKENS // 2, VOCAB), torch.randint(0, VOCAB, (TOKENS // 2,), device="cuda")
        return Operation(cross_entropy.shard_statistics, (logits, labels, 0, VOCAB), nbytes(logits))

    def gradient() -> Operation:
        logits, labels = noise(TOKENS // 2, VOCAB), torch.randint(0, VOCAB, (TOKENS // 2,), device="cuda")
        lse = noise(TOKENS // 2, dtype=torch.float32) + 20
        scale = torch.tensor(1e-3, device="cuda")
        arguments = (logits, labels, lse, scale, 0, VOCAB, 2 * VOCAB, 0.0, 0.0)
        return Operation(cross_entropy.shard_gradient, arguments, 2 * nbytes(logits))

    return {
        "RMSNorm forward": norm_forward,
        "RMSNorm again": norm_again,
        "RMSNorm backward": norm_backward,
        "add and RMSNorm forward": add_norm_forward,
        "RMSNorm backward and the residual's gradient": norm_and_residual_backward,
        "SwiGLU forward": swiglu_forward,
        "SwiGLU backward": swiglu_backward,
        "SwiGLU backward, compiled": swiglu_backward_into,
        "RoPE, Q and K": rotate,
        "RoPE backward, Q, K and V": rotate_back,
        "LSE merge of 2": lambda: merged(2),
        "LSE merge of 3": lambda: merged(3),
        "LSE merge of 4": lambda: merged(4),
        "sum of 3 gradients": lambda: summed(3),
        "dK, dV of 16K stored": lambda: added(4 * TOKENS, "stored"),
        "dK, dV of 16K added": lambda: added(4 * TOKENS, "added"),
        "dK, dV of 4K added": lambda: added(TOKENS, "added"),
        "dK, dV of a slice, rounded": lambda: added(TOKENS, "rounded"),
        "loss statistics": statistics,
        "loss gradient": gradient,
    }


def _liger(name: str, *arguments: Any) -> Callable[[], Any] | None:
    """`module.Function` of liger_kernel.ops, without gradients."""
    function = _liger_function(name)
    return None if function is None else lambda: function.apply(*arguments)


def _liger_backward(name: str, g: Tensor, *arguments: Any) -> Callable[[], Any] | None:
    """Its backward alone; the graph is kept. Liger's may write into `g`, which stays noise. Inputs that record
    gradients are its own: a kernel of ours takes none that do."""
    function = _liger_function(name)
    if function is None:
        return None
    inputs = [a.detach().requires_grad_() if isinstance(a, Tensor) else a for a in arguments]
    out = function.apply(*inputs)
    wanted = [a for a in inputs if isinstance(a, Tensor)]
    return lambda: torch.autograd.grad(out, wanted, g, retain_graph=True)


def _liger_function(name: str) -> Any:
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    module, function = name.split(".")
    return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), function)


def copy_rate() -> float:
    """Bytes a second, read and written, of a kernel that copies a gigabyte."""
    source = torch.zeros(2**28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (1e-6 * microseconds(lambda: torch.add(source, 1, out=target)))


def measure(operation: Operation, rate: float) -> dict[str, Any]:
    form, arguments = operation.form, operation.arguments
    row: dict[str, Any] = {"least_us": 1e6 * operation.moved / rate}
    calls: dict[str, Callable[[], Any]] = {
        "plain": lambda: form.plain(*arguments),
    }
    if operation.compiles:
        calls["compiled"] = lambda: form.compiled(*arguments)
    kernel = form.triton
    with torch.no_grad():
        # As the form itself chooses: where gradients are recorded a kernel fits nothing that wants one.
        if kernel is not None and kernel.fits(*arguments):
            calls["triton"] = lambda: kernel.run(*arguments)
        row |= {f"{name}_us": microseconds(call) for name, call in calls.items()}
        row |= {f"{name}_host_us": host_microseconds(calls[name]) for name in ("plain", "compiled") if name in calls}
        row["runs"] = next(name for name in form.on_gpus if name in calls)
        row["host_us"] = host_microseconds(lambda: form(*arguments))
    row["of_least"] = row[f"{row['runs']}_us"] / row["least_us"]
    if operation.liger is not None:
        try:
            row["liger_us"] = microseconds(operation.liger)
        except Exception as error:
            row["failed"] = f"Liger-Kernel: {type(error).__name__}: {str(error).splitlines()[0][:160]}"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    rate = copy_rate()
    rows: list[dict[str, Any]] = []
    for name, make in operations().items():
        rows.append({"operation": name, "tokens": TOKENS, "copy_gb_s": rate / 1e9, **measure(make(), rate)})
        print(rows[-1], flush=True)
        record.append(options.results, rows[-1] | record.circumstances("python -m benchmarks.fused"))
    record.table(
        rows, COLUMNS, f"one slice of {TOKENS} tokens, Llama-8B shape, bf16; a copy moves {rate / 1e12:.2f} TB/s"
    )


if __name__ == "__main__":
    main()
