"""`once_differentiable` that costs a backward nothing where nobody differentiates it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import function


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's, which refuses gradients of a backward's gradients. Those need `create_graph`; without it the backward
    is called as it is."""
    guarded = function.once_differentiable(backward)

    @functools.wraps(backward)
    def called(ctx: Any, *gradients: Any) -> Any:
        return guarded(ctx, *gradients) if torch.is_grad_enabled() else backward(ctx, *gradients)

    return called
