"""The pipeline benchmark on a CPU: what it counts."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest

from benchmarks import pipeline


def test_codes_of_triton_kernels_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the real kernels, by the cache that Triton keeps for each device: its kernels are there first."""
    pytest.importorskip("triton")
    kernels = importlib.import_module("slimpipe.kernels.triton.norm")
    importlib.import_module("slimpipe.kernels.triton.add")
    before = pipeline.surprises(on_gpu=False)["compiled"]
    one_device = SimpleNamespace(device_caches={0: ({"bf16": object(), "fp32": object()}, {}, "the rest")})
    monkeypatch.setattr(kernels, "_backward", one_device)
    monkeypatch.setattr(kernels, "_sum_parts", SimpleNamespace(device_caches={}))
    assert pipeline.surprises(on_gpu=False)["compiled"] - before == 2
    monkeypatch.setattr(kernels, "_same", one_device, raising=False)  # imported from elsewhere: once
    assert pipeline.surprises(on_gpu=False)["compiled"] - before == 2


def test_a_code_is_one_entry_of_tritons_own_cache() -> None:
    """Where the count looks: the first of what Triton keeps by device."""
    pytest.importorskip("triton")
    from slimpipe.kernels.triton.add import _add
    from tests.support.triton_variants import launches_noted

    with launches_noted(lambda variant: None):
        codes, *_ = _add.device_caches[-1]
    assert codes == {} and isinstance(codes, dict)
