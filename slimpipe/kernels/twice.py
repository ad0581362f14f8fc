"""A part of a model that keeps its input alone and runs once more in the backward (docs/recompute.md).

Autograd runs the second forward and its backward inside the backward of the first: gradients of weights come once, by
the same ways as any (`main_grad` or `grad`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from slimpipe.kernels.once import once_differentiable

First = Callable[[Tensor], tuple[Tensor, Sequence[Tensor]]]
Second = Callable[..., Tensor]


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, first: First, second: Second) -> Tensor:
        # No gradients are recorded in here: what `first` makes on the way is freed on the way.
        before, version = _random_state(x.device), x._version
        out, kept = first(x)
        if x._version != version:
            raise RuntimeError("memory.recompute: a part that runs again has changed its input in place")
        # Dropout and the like must draw the same numbers again.
        drew = any(not torch.equal(a, b) for a, b in zip(before, _random_state(x.device), strict=True))
        ctx.random, ctx.second = before if drew else None, second
        ctx.save_for_backward(x, *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *kept = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            if ctx.random is None:
                out = ctx.second(x, *kept)
            else:
                with torch.random.fork_rng([x.device] if x.is_cuda else []):
                    _set_random_state(x.device, ctx.random)
                    out = ctx.second(x, *kept)
        torch.autograd.backward((out,), (gradient,))
        return x.grad, None, None


def _random_state(device: torch.device) -> list[Tensor]:
    """Of the generators that a model can draw from: the host's and the device's."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _set_random_state(device: torch.device, states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state, device)


def run_twice(first: First, second: Second, x: Tensor) -> Tensor:
    """`first(x)` -> (value, what to keep) now; `second(x, *kept)`, with the same value and gradients, in the backward.

    The value is returned. Raises RuntimeError where `first` changes x in place: the second run would not see the same.
    """
    # An input without gradient would make a value without one, whatever weights are inside.
    return _Twice.apply(x if x.requires_grad else x.detach().requires_grad_(), first, second)


def recomputed(part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """part(x), of which only x is kept for the backward, where `part` runs again. For a block of your own."""
    return run_twice(lambda x: (part(x), ()), part, x) if torch.is_grad_enabled() else part(x)
