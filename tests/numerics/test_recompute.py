"""Recompute modes: how often attention runs, what is written, and the bytes that are kept, to the byte.

That each mode gives the plain process's gradients is the other files' to test: they draw the mode like any option.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from slimpipe.config import Config, ModelConfig
from slimpipe.kernels.attention import PlainAttention
from slimpipe.plan.flops import recomputed_flops_per_token, recomputed_shares
from slimpipe.plan.memory import layer_bytes_per_token
from slimpipe.runtime.kv_slots import LayerSlots, SlicePlace
from slimpipe.runtime.recompute import run_block
from slimpipe.runtime.slice_context import SliceContext
from slimpipe.schedule import Unit
from slimpipe.train.session import Session
from tests.numerics.harness import batch_of, case, config_of

MODES = ("none", "norms", "mlp", "all_but_attention", "full")
LLAMA_8B = ModelConfig(layers=32, hidden_size=4096, heads=32, kv_heads=8, intermediate_size=14336, vocab_size=128256)


# ---- how often ----


@contextmanager
def counted(counts: Counter[str]) -> Iterator[None]:
    """Counts kernel calls and writes of keys, in this process."""
    forward, backward, write = PlainAttention.forward, PlainAttention.backward, LayerSlots.write

    def counting_forward(self: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Any:
        counts["own forward" if causal else "past forward"] += 1
        return forward(self, q, k, v, causal)

    def counting_backward(self: Any, *arguments: Any, causal: bool) -> Any:
        counts["own backward" if causal else "past backward"] += 1
        return backward(self, *arguments, causal)

    def counting_write(self: Any, *arguments: Any) -> None:
        counts["written"] += 1
        write(self, *arguments)

    with (
        mock.patch.object(PlainAttention, "forward", counting_forward),
        mock.patch.object(PlainAttention, "backward", counting_backward),
        mock.patch.object(LayerSlots, "write", counting_write),
    ):
        yield


@pytest.mark.parametrize("name", ["llama", "slimpipe.models.example:ParallelBlocks"])
@pytest.mark.parametrize("mode", MODES)
def test_attention_runs_once_and_twice_in_full(mode: str, name: str) -> None:
    layout = case(n=4, m=2, v=2, recompute=mode)
    session = Session(config_of(layout, model={"name": name}))
    counts: Counter[str] = Counter()
    with counted(counts):
        session.step_gradients(*batch_of(layout))
    own, past = layout.m * layout.n * layout.layer_count, layout.m * (layout.n - 1) * layout.layer_count
    runs = 2 if mode == "full" else 1
    assert counts == {
        "own forward": runs * own,
        "past forward": runs * past,
        "own backward": own,
        "past backward": past,
        "written": own,
    }


# ---- how much ----


def kept_bytes(config: Config) -> float:
    """Bytes a token and layer that the units of one sequence keep between forward and backward, with K and V.

    Two ways of looking, as each is blind to something: what autograd saves (hooks), and every tensor that Python
    still holds, `ctx` attributes and closures included. Storages count once. Left out: weights, and RoPE's tables,
    which a unit has once for all its layers.
    """
    session = Session(config)
    stage, engine = session.stages[0], session.engine
    saved: list[Tensor] = []
    gc.collect()
    gc.freeze()  # what there is by now is not looked at
    units = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.detach()) or t, lambda t: t):
        for index in range(config.shape.n):
            context = engine.context(0, index, engine.place(Unit(0, index, 0)), session.device)
            x = torch.randn(config.train.micro_batch, engine.slice_tokens, config.model.hidden_size).requires_grad_()
            for layer in range(len(stage.blocks)):
                x = stage.run_block(layer, x, context)
            units.append((torch.autograd.graph.get_gradient_edge(x), context))
            del x
    tables = {part.untyped_storage().data_ptr() for _, context in units for part in context.memo("rope", tuple)}
    tables |= {context.positions.untyped_storage().data_ptr() for _, context in units}
    weights = {p.untyped_storage().data_ptr() for p in session.parameters.values()}
    gc.collect()
    found = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}
    for tensor in _tensors():
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    gc.unfreeze()
    tokens = config.shape.n * engine.slice_tokens * config.train.micro_batch
    slots = [x for layer in engine.layer_slots[0].values() for x in (layer.k, layer.v) if x is not None]
    own = tables | weights | {x.untyped_storage().data_ptr() for x in slots}
    kept = sum(size for pointer, size in found.items() if pointer not in own)
    return (kept + sum(x.nbytes for x in slots)) / tokens / config.model.layers


def _tensors() -> list[Tensor]:
    return [x for x in gc.get_objects() if type(x) in (Tensor, torch.nn.Parameter)]


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_kept_is_what_the_formula_says(mode: Any, qk_norm: bool) -> None:
    config = config_of(case(n=4, m=1, recompute=mode, qk_norm=qk_norm, micro_batch=2))
    assert kept_bytes(config) == sum(layer_bytes_per_token(config.model, mode, element=4).values())


def test_bytes_at_the_llama_8b_shape_are_the_designs() -> None:
    """docs/recompute.md: about 139, 94, 37, 21, 12 KB a token and layer, bf16, keys and values included."""
    found = [round(sum(layer_bytes_per_token(LLAMA_8B, mode).values()) / 1e3) for mode in MODES]
    assert found == [139, 94, 37, 21, 12]


# ---- how long ----


def multiplications(session: Session, batch: tuple[Tensor, Tensor]) -> float:
    """Floating-point operations of all matrix products of a step, as torch's dispatcher counts them."""
    with FlopCounterMode(display=False) as counter:
        session.step_gradients(*batch)
    return float(counter.get_total_flops())


@pytest.mark.parametrize("qk_norm", [False, True])
def test_recomputed_products_are_what_the_formula_says(qk_norm: bool) -> None:
    """GEMMs as counted, against those of `none`; attention's own are what `full` does more than `all_but_attention`."""
    layouts = {mode: case(n=2, recompute=mode, qk_norm=qk_norm) for mode in MODES}
    counts = {
        mode: multiplications(Session(config_of(layout)), batch_of(layouts["none"])) for mode, layout in layouts.items()
    }
    model = config_of(layouts["none"]).model
    attention = counts["full"] - counts["all_but_attention"]
    for mode in MODES:
        gemm, _ = recomputed_flops_per_token(model, mode, 64)
        expected = 64 * model.layers * gemm + recomputed_shares(model, mode)[1] * attention
        assert counts[mode] - counts["none"] == pytest.approx(expected, rel=1e-9, abs=1e-9), mode
    # Plain attention computes the whole square of the own slice: score and value product of 4 d a key and head.
    keys = sum(32 * (index + 1) for index in range(2)) * 32
    assert attention == model.layers * keys * 4 * model.heads * model.head_dim


@pytest.mark.parametrize("mode", ["none", "norms", "mlp"])
def test_no_gradient_of_the_residual_stream_is_added_by_itself(mode: str) -> None:
    """What a block computes goes one way each; autograd would add up what comes by two, a pass over memory more."""
    session = Session(config_of(case(n=1, m=1, recompute=mode)))
    context = session.engine.context(0, 0, session.engine.place(Unit(0, 0, 0)), session.device)
    tokens, hidden = session.engine.slice_tokens, session.config.model.hidden_size
    out = session.stages[0].run_block(0, torch.randn(1, tokens, hidden, requires_grad=True), context)
    ways: Counter[Any] = Counter()
    todo, met = [out.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is not None and node not in met:
            met.add(node)
            ways.update(edge for edge in node.next_functions if edge[0] is not None)
            todo += [follower for follower, _ in node.next_functions]
    assert set(ways.values()) == {1}
    assert sum("AddBackward" in node.name() for node in met) == 1


# ---- what a block must not do ----


class Careless(torch.nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, self.weight = fault, torch.nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, slice: Any) -> Tensor:
        if self.fault == "memo":
            slice.memo("table", lambda: self.weight * 2)
        q = x[:, :, None, :]
        out = slice.attend(0, q, q, q)
        if self.fault == "attended":
            out.mul_(2)
        return out[:, :, 0] * self.weight


@pytest.mark.parametrize(
    ("fault", "mode", "message"),
    [
        ("attended", "all_but_attention", "changed what slice.attend gave it in place"),
        ("memo", "all_but_attention", r"slice.memo\('table'\): depends on weights"),
        ("memo", "full", r"slice.memo\('table'\): depends on weights"),
    ],
)
def test_a_block_that_cannot_run_twice_is_refused(fault: str, mode: Any, message: str) -> None:
    place = SlicePlace(0, (), last=True)
    context = SliceContext(torch.arange(4), place, {0: LayerSlots(1, 4, accumulate=False)}, PlainAttention())
    with pytest.raises((RuntimeError, ValueError), match=message):
        run_block(Careless(fault), torch.randn(1, 4, 8, requires_grad=True), context, mode)
