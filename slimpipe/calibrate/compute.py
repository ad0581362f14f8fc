"""Rates of one device: a layer's GEMMs and attention by tokens of a slice, its memory, and the way to the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slimpipe.calibrate.timing import seconds
from slimpipe.kernels.attention import AttentionBackend
from slimpipe.kernels.weight_grad import add_matmul
from slimpipe.schedule import Rate

if TYPE_CHECKING:
    from slimpipe.config.sections import ModelConfig


@dataclass(frozen=True)
class Bench:
    """What is measured on: device and dtype of compute, seconds a measurement."""

    device: torch.device
    dtype: torch.dtype
    least: float

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=self.dtype, device=self.device)

    def time(self, work: Callable[[], object]) -> float:
        return seconds(work, self.device, self.least)


def gemm_rate(bench: Bench, model: ModelConfig, tokens: int) -> float:
    """Operations a second over a layer's four projections, forward and both gradients, weights' into fp32."""
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    widths = [
        (model.hidden_size, q + 2 * kv),
        (q, model.hidden_size),
        (model.hidden_size, 2 * model.intermediate_size),
        (model.intermediate_size, model.hidden_size),
    ]
    total, operations = 0.0, 0
    for wide_in, wide_out in widths:
        x, w, g = bench.randn(tokens, wide_in), bench.randn(wide_out, wide_in), bench.randn(tokens, wide_out)
        accumulator = torch.zeros(wide_out, wide_in, device=bench.device)

        def step(x: Tensor = x, w: Tensor = w, g: Tensor = g, accumulator: Tensor = accumulator) -> None:
            x @ w.t()
            g @ w
            add_matmul(accumulator, g, x)

        total += bench.time(step)
        operations += 6 * tokens * wide_in * wide_out
    return operations / total


@dataclass(frozen=True)
class AttentionRates:
    """Operations a second, as a hardware profile counts them."""

    forward: float
    backward: float
    own_forward: float
    own_backward: float


def attention_rates(
    bench: Bench, backend: AttentionBackend, model: ModelConfig, tokens: int, past: int
) -> AttentionRates:
    """Of a slice: to `past` earlier tokens, and to itself, causal."""
    q, dout = (bench.randn(1, tokens, model.heads, model.head_dim) for _ in range(2))
    k, v = (bench.randn(1, max(past, tokens), model.kv_heads, model.head_dim) for _ in range(2))
    pair = 4.0 * tokens * model.heads * model.head_dim

    def rates(length: int, causal: bool) -> tuple[float, float]:
        keys, values = k[:, :length], v[:, :length]
        out, lse = backend.forward(q, keys, values, causal)
        forward = bench.time(lambda: backend.forward(q, keys, values, causal))
        backward = bench.time(lambda: backend.backward(dout, q, keys, values, out, lse, causal))
        operations = pair * length / (2 if causal else 1)
        return operations / forward, 2.5 * operations / backward

    return AttentionRates(*rates(past, causal=False), *rates(tokens, causal=True))


def memory_rate(bench: Bench, megabytes: int = 512) -> float:
    """Bytes a second, read and written, of a sum of two tensors into a third."""
    count = megabytes * 2**20 // bench.dtype.itemsize
    a, b, c = (torch.zeros(count, dtype=bench.dtype, device=bench.device) for _ in range(3))
    return 3 * a.nbytes / bench.time(lambda: torch.add(a, b, out=c))


def host_rate(bench: Bench, megabytes: int = 256) -> Rate | None:
    """To pinned host memory, one way at a time; None where the device is the host."""
    if bench.device.type != "cuda":
        return None
    host = torch.empty(megabytes * 2**20, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device=bench.device)
    whole = bench.time(lambda: host.copy_(device, non_blocking=True))
    little = bench.time(lambda: host[:64].copy_(device[:64], non_blocking=True))
    return Rate(little, host.nbytes / whole)
