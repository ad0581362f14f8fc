"""The layers and the training loop of the swap benchmarks, and what their memory is by formula."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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

    @contextlib.contextmanager
    def cap(self, nbytes: int) -> Iterator[None]:
        """Inside, the allocator takes no more from the device; nothing on a CPU."""
        if not self.cuda:
            yield
            return
        total = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total))
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

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


def make(machine: Machine, kind: Callable[[Shape], nn.Module], shape: Shape, layers: int) -> nn.Sequential:
    """That many layers, the same weights each time."""
    torch.manual_seed(0)
    with machine.device:
        return nn.Sequential(*(kind(shape) for _ in range(layers))).to(machine.dtype)


def hidden(machine: Machine, shape: Shape, batch: int, tokens: int) -> Tensor:
    with machine.device:
        return torch.randn(batch, tokens, shape.hidden, dtype=machine.dtype)


def saved_values(shape: Shape) -> int:
    """Values that a `Layer` saves a token: both norms' inputs and outputs, q, k and v, attention's output, and the four
    intermediate ones of SwiGLU. Attention's fp32 log-sum-exp and the norms' are left out: under 0.2 %."""
    head = shape.hidden // shape.heads
    return 6 * shape.hidden + 2 * shape.kv_heads * head + 4 * shape.intermediate


def plain_bytes(shape: Shape, layers: int, tokens: int, itemsize: int) -> int:
    """Peak of a step that moves nothing, which comes as the backward begins: weights, what all layers save, and in the
    last layer the gradients of its stream, of SwiGLU's product and of one of its factors, and of one weight.

    Measured on an H200 (4 layers of the Llama-8B shape, bf16): 46.83 GiB at 64K tokens, 91.86 at 128K; here 46.73 and
    91.73.
    """
    head = shape.hidden // shape.heads
    attention = shape.hidden * (2 * shape.hidden + 2 * shape.kv_heads * head)
    weights = layers * (attention + 3 * shape.hidden * shape.intermediate + 2 * shape.hidden)
    at_once = 2 * shape.intermediate + shape.hidden
    gradient = shape.hidden * shape.intermediate
    return itemsize * (weights + gradient + tokens * (layers * saved_values(shape) + at_once))


def longest(shape: Shape, layers: int, budget: int, itemsize: int, multiple: int) -> int:
    """The most tokens, a multiple of `multiple`, of which a plain step fits into the budget."""
    none, one = (plain_bytes(shape, layers, tokens, itemsize) for tokens in (0, 1))
    return max(0, budget - none) // (one - none) // multiple * multiple


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
