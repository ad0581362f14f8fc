"""Attention, merges and sums once before the first step, in every length of a past and every number of parts of the
plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from slimpipe.kernels import fuse
from slimpipe.kernels.fuse import wide
from slimpipe.kernels.merge import merge
from slimpipe.kernels.sums import add_pairs, sum_rounded
from slimpipe.runtime.engine import Engine
from slimpipe.runtime.slice_context import AttentionShapes


def warm_up_attention(engine: Engine, attention: Mapping[tuple[int, AttentionShapes], int]) -> None:
    """Attention to pasts of every other length that a step has (two ranges, lent ranges and what they leave), and
    merges of every number of parts: each length is a kernel of its own to cuDNN, each number to the compiler.

    `attention`: by chunk and shapes, a layer that attends in these; its slots have their memory.
    """
    for (chunk, shapes), layer in attention.items():
        keys = engine.layer_slots[chunk][layer].k
        assert keys is not None
        if keys.device.type == "cuda" or fuse.runs_compiled(keys):
            _attention(engine, chunk, layer, shapes.query, keys)


@torch.no_grad()
def _attention(engine: Engine, chunk: int, layer: int, query: torch.Size, keys: Tensor) -> None:
    """Without gradients, as inside the autograd Functions that call these: with them it would be other code to the
    compiler, which would compile again in mid-step, behind posted receives."""
    own: set[int] = set()
    helped: set[int] = set()
    counts: set[tuple[int, int]] = set()
    for action in engine.actions:
        if action.op.is_compute and action.unit.chunk == chunk:
            ranges, lent = engine.past_ranges(action)
            own |= {stop - start for start, stop in ranges}
            # A slice may be one block with a part of its past, where the backend can, or may not.
            counts |= {(1 + len(ranges), lent), (max(1, len(ranges)), lent)}
        if engine.loans is not None and (action.op.is_compute or action.op.is_help):
            helped |= engine.loans.helped_lengths(action)
    q = torch.zeros(query, dtype=keys.dtype, device=keys.device)
    dq = torch.zeros_like(q)

    def every_length() -> None:
        nonlocal dq
        for length in sorted(own):
            # Views of the real buffer: cuDNN's graphs are kept by strides too.
            k, v = engine.layer_slots[chunk][layer].read(0, length)
            dq = _there_and_back(engine, q, k, v)
        for length in sorted(helped):
            k = torch.zeros(query[0], length, *keys.shape[2:], dtype=keys.dtype, device=keys.device)
            _there_and_back(engine, q, k, k.clone())

    # Autograd has a thread of its own for a GPU's backwards, and each thread has its own cuDNN graphs.
    every_length()
    _within_a_backward(every_length, keys.device)
    shape = (query[0], query[2], query[1])
    for computed, lent in sorted(counts):
        # Tensors of their own: the compiler's code for one number of parts also depends on which are the same.
        lses = [torch.zeros(shape, dtype=wide(keys.dtype), device=keys.device) for _ in range(computed + lent)]
        merge([torch.zeros_like(q) for _ in lses], lses)
        # The kernel's gradients are laid out as it likes, those that come from other ranks as they were sent.
        sum_rounded([torch.zeros_like(dq if part < computed else q) for part in range(computed + lent)])
    if any(lent for _, lent in counts):
        # So do gradients of lent keys, and there may be other code for that than blocks have met.
        size = (query[0], engine.slice_tokens, *keys.shape[2:])
        part = torch.zeros(size, dtype=keys.dtype, device=keys.device)
        total = torch.zeros(size, dtype=wide(keys.dtype), device=keys.device)
        pair = total, total.clone()
        add_pairs((part, part), None, pair)
        add_pairs((part, part), pair, pair)


class _Within(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, work: Callable[[], None]) -> Tensor:
        ctx.work = work
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        ctx.work()
        return dout, None


@torch.enable_grad()
def _within_a_backward(work: Callable[[], None], device: torch.device) -> None:
    """Runs `work` where autograd runs the backwards of a device."""
    x: Tensor = _Within.apply(torch.zeros((), device=device, requires_grad=True), work)
    x.backward()


def _there_and_back(engine: Engine, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The gradient of q."""
    out, lse = engine.backend.forward(q, k, v, causal=False)
    return engine.backend.backward(torch.zeros_like(q), q, k, v, out, lse, causal=False)[0]
