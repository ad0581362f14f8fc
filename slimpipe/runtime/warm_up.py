"""Runs every kernel of a step once before the first step, and takes the step's memory from the driver.

A cold process that had posted NCCL receives hung in its first step (FACTS.md section 2): loading a kernel or calling
cudaMalloc can wait for the device while a receive spins on it. So before anything is posted each rank sends one whole
sequence through one block of each chunk, on its own, with the shapes and pasts of the real slices.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from slimpipe.kernels import fuse
from slimpipe.kernels.fuse import wide
from slimpipe.kernels.merge import merge
from slimpipe.kernels.sums import sum_rounded
from slimpipe.runtime.engine import Engine
from slimpipe.runtime.kv_slots import SlicePlace
from slimpipe.runtime.stage import Stage

SMALL: Final = 2**20
"""Bytes: the largest tensor that torch's allocator for CUDA takes from its pool of small ones."""


def warm_up(engine: Engine, micro_batch: int, hidden: int, dtype: torch.dtype, device: torch.device) -> int:
    """Forward and backward of one sequence of noise through one block a chunk, the embedding and the head.

    Gradients land in `main_grad` like any; the caller clears them. Allocates every layer's KV slots on the way.
    Returns the bytes that one unit keeps for its backward in the largest chunk (0 on the CPU, where they are not
    counted).
    """
    # The first GEMM of a backward thread says so once; it is set up here on purpose.
    warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")
    largest = 0
    query_shape: torch.Size | None = None
    for chunk, stage in enumerate(engine.stages):
        graphs = []
        before = 0
        for index in range(engine.shape.n):
            engine.progress.now(f"warming up chunk {chunk}, slice {index}")
            place = SlicePlace(index, ((0, index),) if index else (), last=index == engine.shape.n - 1)
            context = engine.context(chunk, index, place, device)
            x = torch.randn(micro_batch, engine.slice_tokens, hidden, dtype=dtype, device=device).requires_grad_()
            before = _allocated(device)
            out = stage.run_block(0, x, context)
            query_shape = context.query_shape
            graphs.append((get_gradient_edge(out), torch.randn_like(out)))
            # The output takes the place of the next block's input, so it counts once a layer. The first slice's block
            # takes the slots' memory too: it counts only where there is no other.
            if index or engine.shape.n == 1:
                largest = max(largest, (_allocated(device) - before) * len(stage.blocks))
        while graphs:
            edge, gradient = graphs.pop()
            torch.autograd.backward((edge,), (gradient,))
        _ends(engine, stage, micro_batch, hidden, dtype, device)
        first = engine.layer_slots[chunk][stage.layers[0]]
        for slots in engine.layer_slots[chunk].values():
            slots.allocate_like(first)
    some = next(iter(engine.layer_slots[0].values()))
    assert some.k is not None and query_shape is not None
    if engine.loans is not None:
        engine.progress.now("warming up the exchange")
        engine.loans.warm_up(query_shape, some.k)
    _attention(engine, query_shape, some.k)
    if engine.vocabulary is not None:
        engine.progress.now("warming up the vocabulary passes")
        engine.vocabulary.warm_up(micro_batch, engine.slice_tokens, engine.loss)
    return largest


@torch.no_grad()
def warm_up_evaluation(engine: Engine, micro_batch: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    """The same for a forward-only engine that shares another's slots, after that one's warm-up: kernels without
    gradients, pasts of other lengths, loans between other ranks. Takes no random numbers."""
    query_shape: torch.Size | None = None
    for chunk, stage in enumerate(engine.stages):
        for index in range(engine.shape.n):
            engine.progress.now(f"warming up the evaluation: chunk {chunk}, slice {index}")
            place = SlicePlace(index, ((0, index),) if index else (), last=index == engine.shape.n - 1)
            context = engine.context(chunk, index, place, device)
            x = torch.zeros(micro_batch, engine.slice_tokens, hidden, dtype=dtype, device=device)
            stage.blocks[0](x, context)
            query_shape = context.query_shape
        tokens = torch.zeros(micro_batch, engine.slice_tokens, dtype=torch.int64, device=device)
        if stage.embedding is not None:
            stage.embedding(tokens)
        if stage.head is not None:
            out = stage.head(x)
            if engine.vocabulary is None:
                stage.token_losses(out, tokens, engine.ce_chunk, engine.loss)
    some = next(iter(engine.layer_slots[0].values()))
    assert some.k is not None and query_shape is not None
    if engine.loans is not None:
        engine.loans.warm_up(query_shape, some.k)
    _attention(engine, query_shape, some.k)


@torch.no_grad()
def _attention(engine: Engine, query: torch.Size, keys: Tensor) -> None:
    """Attention to pasts of every other length that a step has (two ranges, lent ranges and what they leave), and
    merges of every number of parts: each length is a kernel of its own to cuDNN, each number to the compiler.

    Without gradients, as inside the autograd Functions that call them: with them it would be other code to the
    compiler, which would compile again in mid-step, behind posted receives."""
    if keys.device.type == "cpu" and not fuse.runs_compiled(keys):
        return
    own: set[tuple[int, int]] = set()
    helped: set[int] = set()
    counts: set[tuple[int, int]] = set()
    for action in engine.actions:
        if action.op.is_compute:
            ranges, lent = engine.past_ranges(action)
            own |= {(action.unit.chunk, stop - start) for start, stop in ranges}
            # A slice may be one block with a part of its past, where the backend can, or may not.
            counts |= {(1 + len(ranges), lent), (max(1, len(ranges)), lent)}
        if engine.loans is not None and (action.op.is_compute or action.op.is_help):
            helped |= engine.loans.helped_lengths(action)
    q = torch.zeros(query, dtype=keys.dtype, device=keys.device)
    dq = torch.zeros_like(q)

    def every_length() -> None:
        nonlocal dq
        for chunk, length in sorted(own):
            # Views of the real buffer: cuDNN's graphs are kept by strides too.
            k, v = engine.layer_slots[chunk][engine.stages[chunk].layers[0]].read(0, length)
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


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _ends(
    engine: Engine, stage: Stage, micro_batch: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> None:
    tokens = torch.zeros(micro_batch, engine.slice_tokens, dtype=torch.int64, device=device)
    if stage.embedding is not None:
        x: Tensor = stage.embedding(tokens)
        x.backward(torch.zeros_like(x))
    if stage.head is not None:
        x = torch.randn(micro_batch, engine.slice_tokens, hidden, dtype=dtype, device=device).requires_grad_()
        out = stage.head(x)
        if engine.vocabulary is None:
            stage.loss(out, tokens, torch.zeros((), device=device), engine.ce_chunk, engine.loss).backward()
        else:
            out.backward(torch.zeros_like(out))


def reserve(total: int, small: int, device: torch.device) -> int:
    """Takes from the driver what a step will need beside what is allocated now, `total` bytes with it, and leaves it to
    the allocator. Returns the bytes taken; 0 on the CPU.

    The steps then find their memory in the cache: no cudaMalloc while a receive is outstanding. `small` of the bytes
    are of tensors up to SMALL, which the allocator keeps in segments of their own. What the warm-up left in the cache
    goes back first: in pieces of its shapes it would be of little use. Takes no more than what is free, less a
    twentieth.
    """
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    missing = max(0, min(total - torch.cuda.memory_allocated(device), int(free * 0.95)))
    few = min(small, missing) // SMALL
    sizes = [*[SMALL] * few, missing - few * SMALL]
    # Held all at once, so that each is memory of its own.
    held = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    return sum(tensor.nbytes for tensor in held)
