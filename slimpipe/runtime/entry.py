"""Where a unit's graph begins: its gradient comes out without the graph holding on to the input.

A leaf would: `AccumulateGrad` keeps its tensor, and the input of a unit whose activations are in host memory would stay
on the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Entry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: Tensor, x: Tensor, into: list[Tensor]) -> Tensor:
        ctx.into = into
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        # As a leaf's would be: it is sent on.
        ctx.into.append(gradient.contiguous())
        return None, None, None


def enter(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(x as the input of a graph, the list that its gradient will be in). x is not a part of any graph."""
    into: list[Tensor] = []
    handle = torch.empty(0, device=x.device).requires_grad_()
    entered: Tensor = _Entry.apply(handle, x, into)
    return entered, into
