"""Blocks made out of Llama's, which leaves out in its second run what only its output needs: they read that output."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from slimpipe.models.contract import may_leave_out
from slimpipe.models.llama import Block, Llama
from slimpipe.train.session import Session
from tests.numerics.harness import TOLERANCE, batch_of, case, config_of, copies
from tests.support.reference import relative_error


class Derived(Block):
    """Goes on to compute with what Llama's block gives."""

    def forward(self, x: Tensor, slice: Any) -> Tensor:
        return super().forward(x, slice).sin()


class Holder(torch.nn.Module):
    """Has Llama's block as a part."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.part = Block(config, layer)

    def forward(self, x: Tensor, slice: Any) -> Tensor:
        return self.part(x, slice).sin()


class Hooked(Block):
    """Has a hook that does."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config, layer)
        self.register_forward_hook(lambda block, inputs, out: out.sin())


def with_sine(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(forward)
    def wrapper(*args: Any) -> Tensor:
        return forward(*args).sin()

    return wrapper


class Wrapped(Block):
    """Has a decorator that does, and that copies what is marked."""

    forward = with_sine(Block.forward)  # type: ignore[assignment]


class MadeOfLlamas(Llama):
    """`model.options`: the class of its blocks (`block`)."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        make = {"derived": Derived, "holder": Holder, "hooked": Hooked, "wrapped": Wrapped}[
            config.model.options["block"]
        ]
        self.layers = torch.nn.ModuleList(make(config, layer) for layer in range(config.model.layers))


@pytest.mark.parametrize("mode", ["all_but_attention", "full"])
@pytest.mark.parametrize("block", ["derived", "holder", "hooked", "wrapped"])
def test_a_block_made_out_of_llamas_computes_all_that_it_reads(block: str, mode: str) -> None:
    model = {"name": f"{__name__}:{MadeOfLlamas.__name__}", "options": {"block": block}}

    def gradients(mode: str) -> tuple[float, dict[str, Tensor]]:
        session = Session(config_of(case(n=2, recompute=mode), model=model))
        return session.step_gradients(*batch_of(case(n=2))), copies(session.gradients())

    (loss, expected), (again, found) = gradients("none"), gradients(mode)
    assert again == pytest.approx(loss, rel=1e-6)
    for name, gradient in expected.items():
        assert relative_error(found[name], gradient) < TOLERANCE, name


@pytest.mark.parametrize("block", [Block, Derived, Wrapped])
def test_only_llamas_own_forward_leaves_out(block: Any) -> None:
    config = config_of(case(n=2))
    assert may_leave_out(block(config, 0)) == (block is Block)
