"""Runs every kernel of a step once before the first step.

A cold process that had posted NCCL receives hung in its first step: loading a kernel or calling cudaMalloc can wait for
the device while a receive spins on it. So before anything is posted each rank runs its blocks, its ends, attention and
merges, on its own, with the shapes and pasts of the real slices; then exchange and vocabulary passes, which meet other
ranks, in one order.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from slimpipe.kernels.weight_grad import Waiting, main_grad, waiting_of
from slimpipe.runtime.engine import Engine
from slimpipe.runtime.stage import Stage
from slimpipe.runtime.warm_up_attention import warm_up_attention
from slimpipe.runtime.warm_up_blocks import Blocks, Inputs, as_swapped, refuse_other


def warm_up(engine: Engine, micro_batch: int, hidden: int, dtype: torch.dtype, device: torch.device) -> int:
    """Forward and backward of noise through each block, the embedding and the head.

    Gradients land in `main_grad` like any; the caller clears them. Every layer's KV slots take their memory on the way.
    Returns the bytes that one unit keeps for its backward in the largest chunk (0 on the CPU, where they are not
    counted). Raises ValueError where layers attend in shapes that the exchange cannot lend, or a part of the model
    returns another kind of tensor than the next one needs.
    """
    # The first GEMM of a backward thread says so once; it is set up here on purpose.
    warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")
    inputs = Inputs(micro_batch, hidden, dtype, device)
    blocks = Blocks(engine, inputs)
    unit_bytes = blocks.run()
    for stage in engine.stages:
        _ends(engine, stage, inputs)
    if engine.swaps is not None:
        blocks.run_as_swapped()
        for stage in engine.stages:
            _ends(engine, stage, inputs, as_swapped)
    for stage in engine.stages:
        _joined_gradients(engine, stage, inputs)
    _attention_and_exchange(engine, blocks)
    if engine.vocabulary is not None:
        engine.progress.now("warming up the vocabulary passes")
        engine.vocabulary.warm_up(micro_batch, engine.slice_tokens, engine.loss)
    return unit_bytes


@torch.no_grad()
def warm_up_evaluation(engine: Engine, micro_batch: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    """The same for a forward-only engine that shares another's slots, after that one's warm-up: kernels without
    gradients, pasts of other lengths, loans between other ranks. Takes no random numbers."""
    inputs = Inputs(micro_batch, hidden, dtype, device, noise=False)
    blocks = Blocks(engine, inputs)
    blocks.run()
    tokens = torch.zeros(micro_batch, engine.slice_tokens, dtype=torch.int64, device=device)
    for stage in engine.stages:
        if stage.embedding is not None:
            stage.embedding(tokens)
        if stage.head is not None:
            out = stage.head(inputs.slice(engine.slice_tokens))
            if engine.vocabulary is None:
                stage.token_losses(out, tokens, engine.ce_chunk, engine.loss)
    _attention_and_exchange(engine, blocks)


def _attention_and_exchange(engine: Engine, blocks: Blocks) -> None:
    if engine.loans is not None:
        engine.progress.now("warming up the exchange")
        (chunk, shapes), layer = next(iter(blocks.attention.items()))
        keys = engine.layer_slots[chunk][layer].k
        assert keys is not None
        engine.loans.warm_up(shapes.query, keys, engine.actions)
    engine.progress.now("warming up attention")
    warm_up_attention(engine, blocks.attention)


def _joined_gradients(engine: Engine, stage: Stage, inputs: Inputs) -> None:
    """Weight gradients of as many slices in one GEMM as a step has (`train.weight_grad_slices`), and of the rest at its
    end: blocks have met other numbers, where a sequence has fewer slices or a step another rest."""
    backwards, tokens, met = engine.shape.m * engine.shape.n, inputs.micro_batch * engine.slice_tokens, set()
    for parameter in (parameter for block in stage.blocks for parameter in block.parameters()):
        acc = main_grad(parameter)
        waiting = None if acc is None else waiting_of(acc)
        if acc is None or waiting is None or parameter.shape in met:
            continue
        met.add(parameter.shape)
        g, x = (torch.zeros(tokens, width, dtype=inputs.dtype, device=inputs.device) for width in parameter.shape)
        for slices in {min(waiting.slices, backwards), backwards % waiting.slices} - {0}:
            joined = Waiting(slices)
            for _ in range(slices):
                joined.add(acc, g, x)


def _ends(
    engine: Engine, stage: Stage, inputs: Inputs, saving: Callable[[], AbstractContextManager[None]] = nullcontext
) -> None:
    tokens = torch.zeros(inputs.micro_batch, engine.slice_tokens, dtype=torch.int64, device=inputs.device)
    if stage.embedding is not None:
        with saving():
            x: Tensor = stage.embedding(tokens)
        refuse_other("the embedding", x, inputs.slice(engine.slice_tokens))
        x.backward(torch.zeros_like(x))
    if stage.head is not None:
        with saving():
            x = inputs.slice(engine.slice_tokens).requires_grad_()
            out = stage.head(x)
            refuse_other("the head", out, x)
            if engine.vocabulary is None:
                scale = torch.zeros((), device=inputs.device)
                out = stage.loss(out, tokens, scale, engine.ce_chunk, engine.loss)
        out.backward(torch.zeros_like(out))
