"""The swap benchmark's cases on a CPU: the same numbers with and without swap, and what is said to fit does fit."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import swap, swap_peers
from benchmarks.swap_budget import capped
from benchmarks.swap_model import (
    LLAMA_8B,
    TINY,
    Layer,
    Machine,
    Shape,
    hidden,
    longest,
    make,
    plain_bytes,
    saved_values,
)

GIB = 2**30


@pytest.mark.parametrize("what", ["sequence", "batch"])
def test_four_times_what_fits_under_a_cap(what: str) -> None:
    row = capped(Machine(), what, swap.CAP_TINY, 12, TINY, 64 << 20, 16)
    assert row["fits_tokens"] > 0 and row["batch"] * row["tokens"] == 4 * row["fits_tokens"]
    assert row["plain_by_formula_gib"] > row["cap_gib"]
    assert row["within_cap"] and row["losses_equal"]
    assert row["moved_gib"] > 0.3 * (row["plain_by_formula_gib"] - row["cap_gib"])


def test_swap_in_the_memory_of_full_recompute() -> None:
    row = swap.cases(tiny=True)["equal-peak"](Machine())
    assert row["losses_equal"] and row["moved_gib"] > 0 and row["late_gib"] == 0


def test_the_longest_that_fits() -> None:
    for layers, budget in ((16, 24 * GIB), (4, 60 * GIB)):
        tokens = longest(LLAMA_8B, layers, budget, 2, 256)
        assert plain_bytes(LLAMA_8B, layers, tokens, 2) <= budget < plain_bytes(LLAMA_8B, layers, tokens + 256, 2)
    assert longest(LLAMA_8B, 16, GIB, 2, 256) == 0  # the weights alone are more


class Kernel(torch.autograd.Function):
    """Saves what a fused attention kernel does."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q + k.mean() + v.mean()
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, _ = ctx.saved_tensors
        return g, k * 0, v * 0


def test_saved_values_are_those_that_autograd_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **_: Kernel.apply(q, k, v))
    machine, shape = Machine(), Shape(64, 4, 2, 224)
    layer, x = make(machine, Layer, shape, 1), hidden(machine, shape, 1, 128)
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    storages: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            storages[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x.requires_grad_()).sum()
    found = sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
    # On a CPU torch's norm is not fused, and saves its quotient too.
    assert found == pytest.approx(128 * 4 * (saved_values(shape) + 2 * shape.hidden), rel=0.01)


def test_a_peer_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchtune", None)
    with pytest.raises(swap_peers.Missing, match="torchtune.training does not import"):
        swap_peers.torchtune(Machine())
    monkeypatch.setitem(sys.modules, "megatron.core.pipeline_parallel", None)
    with pytest.raises(swap_peers.Missing, match="megatron-core's fine-grained offload does not import"):
        swap_peers.megatron(Machine())
