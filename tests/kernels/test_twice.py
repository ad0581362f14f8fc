"""A part that runs twice gives the value and the gradients of one run, and keeps its input alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from slimpipe.kernels.mlp import norm_swiglu
from slimpipe.kernels.norm import norm_linear
from slimpipe.kernels.twice import recomputed, run_twice
from slimpipe.parallel.gradients import GradientBuffer


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.dropout(torch.tanh(self.up(x)), 0.5))


def results(part: nn.Module, x: Tensor, again: bool) -> list[Tensor]:
    """Value, gradient of x, gradients of the weights; with the same random numbers each time."""
    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    out = recomputed(part, x) if again else part(x)
    torch.rand(7)  # between a unit's forward and its backward others draw
    out.backward(torch.ones_like(out))
    assert x.grad is not None
    found = [out.detach(), x.grad, *(p.grad.clone() for p in part.parameters() if p.grad is not None)]
    part.zero_grad()
    return found


def test_value_and_gradients_are_those_of_one_run_with_the_same_dropout() -> None:
    part, x = Part(), torch.randn(5, 6)
    once, twice = results(part, x, again=False), results(part, x, again=True)
    assert len(once) == len(twice) == 6
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
    after = torch.rand(3)
    results(part, x, again=False)
    assert torch.equal(after, torch.rand(3)), "the second run leaves the generator where it was"


def test_only_the_input_is_kept() -> None:
    part, x, packed = Part(), torch.randn(5, 6).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.data_ptr()) or t, lambda t: t):
        recomputed(part, x)
    assert packed == [x.data_ptr()]


def test_weights_get_gradients_behind_an_input_without_one() -> None:
    part = Part()
    recomputed(part, torch.randn(5, 6)).sum().backward()
    assert all(parameter.grad is not None for parameter in part.parameters())


def test_without_gradients_it_runs_once() -> None:
    calls = []

    def part(x: Tensor) -> Tensor:
        calls.append(x)
        return x * 2

    with torch.no_grad():
        assert not recomputed(part, torch.ones(2)).requires_grad
    assert len(calls) == 1


def test_plain_modules_add_into_main_grad_once() -> None:
    part, x = Part().eval(), torch.randn(5, 6)
    buffer = GradientBuffer(dict(part.named_parameters()))

    def gradients(again: bool) -> Tensor:
        buffer.zero()
        torch.manual_seed(1)
        (recomputed(part, x) if again else part(x)).sum().backward()
        return buffer.buffer.clone()

    assert torch.equal(gradients(False), gradients(True))


def test_what_is_kept_comes_back() -> None:
    x = torch.tensor([2.0], requires_grad=True)
    run_twice(lambda x: (x * 3, (x * 5,)), lambda x, kept: x * kept, x).backward()
    assert x.grad == 10.0  # of the second run, with what the first kept


def test_an_input_changed_in_place_is_refused() -> None:
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="changed its input in place"):
        recomputed(lambda x: x.add_(1), x)


def test_a_run_for_the_backward_alone_computes_what_is_read() -> None:
    """`rows` and `value=False`: the rest is zero, the gradients are whole."""
    x, norm, weight, gate_up, down = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 3, 8), (8,), (5, 8), (12, 8), (8, 6))
    )
    whole, part = (norm_linear(x, norm, weight, 1e-5, False, rows) for rows in (None, 2))
    torch.testing.assert_close(part[..., :2], whole[..., :2], rtol=1e-12, atol=1e-12)
    assert not part[..., 2:].any()
    g = torch.randn_like(whole)
    inputs = [x, norm, weight]
    for a, b in zip(torch.autograd.grad(whole, inputs, g), torch.autograd.grad(part, inputs, g), strict=True):
        assert torch.equal(a, b)
    whole, none = (norm_swiglu(x, norm, gate_up, down, 1e-5, value) for value in (True, False))
    assert whole.all() and none.shape == whole.shape and not none.any()
    g, inputs = torch.randn_like(whole), [x, norm, gate_up, down]
    for a, b in zip(torch.autograd.grad(whole, inputs, g), torch.autograd.grad(none, inputs, g), strict=True):
        assert torch.equal(a, b)
