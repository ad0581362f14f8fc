"""The table of fused operations: the form that it says runs is the one that does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import fused
from slimpipe.kernels import fuse
from slimpipe.kernels.triton import recorded


def test_the_form_said_to_run_is_the_one_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of tensors that want gradients, which a kernel takes where none are recorded."""
    ran: list[str] = []

    def form_called(name: str) -> Any:
        return lambda x: ran.append(name)

    def timed(work: Any) -> float:
        work()
        return 1.0

    def function(x: torch.Tensor) -> None:
        ran.append("plain")

    monkeypatch.setattr(fused, "microseconds", timed)
    monkeypatch.setattr(fused, "host_microseconds", timed)
    monkeypatch.setattr(fuse, "ON_GPUS", {"function": ("triton", "compiled")})
    monkeypatch.setattr(fuse, "runs_compiled", lambda argument: True)
    monkeypatch.setattr(fuse, "runs_triton", lambda argument: True)
    form = fuse.Fused(function)
    form.__dict__["compiled"] = form_called("compiled")
    form.__dict__["triton"] = SimpleNamespace(fits=lambda x: not recorded(x), run=form_called("triton"))
    for wants in (False, True):
        row = fused.measure(fused.Operation(form, (torch.zeros(8, requires_grad=wants),), 32), 1e9)
        assert row["runs"] == ran[-1] == "triton"
        assert row["triton_us"] == row["compiled_us"] == row["plain_us"] == 1.0
