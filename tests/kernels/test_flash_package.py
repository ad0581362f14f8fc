"""flash-attn 2, 3 and 4 by their argument lists, with stand-ins; what does not fit is refused."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from slimpipe.kernels.attention import PlainAttention, candidates, select_backend
from slimpipe.kernels.attention.flash_package import PACKAGES, PackagedFlashAttention, is_installed, load_package
from tests.support.fake_flash import Call, package

NAMES = list(PACKAGES)


@pytest.mark.parametrize("name", NAMES)
def test_a_past_and_a_slice_in_one_block_and_in_two(name: str) -> None:
    calls: list[Call] = []
    backend = PackagedFlashAttention(name, package(name, calls))
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(2, n, heads, 8, generator=generator) for n, heads in ((8, 4), (8, 2), (8, 2), (8, 4)))
    whole = PlainAttention()
    out, lse = whole.forward(q, k, v, True)
    dq, dk, dv = whole.backward(dout, q, k, v, out, lse, True)
    last = slice(5, 8)
    found, found_lse = backend.forward(q[:, last], k, v, causal=True)
    torch.testing.assert_close(found, out[:, last])
    torch.testing.assert_close(found_lse, lse[:, :, last])
    # Three queries' part of the gradients: the whole less that of the first five.
    first = whole.backward(dout[:, :5], q[:, :5], k[:, :5], v[:, :5], out[:, :5], lse[:, :, :5], True)
    part = backend.backward(dout[:, last], q[:, last], k, v, out[:, last], lse[:, :, last], causal=True)
    torch.testing.assert_close(part[0], dq[:, last], rtol=1e-4, atol=1e-5)
    for ours, all_, before in zip(part[1:], (dk, dv), first[1:], strict=True):
        expected = all_.clone()
        expected[:, :5] -= before
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    # An ordinary pair of blocks too: the past without a mask.
    backend.forward(q[:, last], k[:, :5], v[:, :5], causal=False)
    assert calls == [Call("F", 3, 8, True), Call("B", 3, 8, True), Call("F", 3, 5, False)]


def test_custom_operators_are_asked_for_what_they_wrap() -> None:
    calls: list[Call] = []
    module = package("flash2", calls)
    inner = module._flash_attn_forward

    class Operator:
        _init_fn = staticmethod(inner)

        def __call__(self, *arguments: Any, **named: Any) -> Any:
            return inner(*arguments, **named)

    module._flash_attn_forward = Operator()
    x = torch.randn(1, 4, 2, 8)
    PackagedFlashAttention("flash2", module).forward(x, x, x, causal=True)
    assert calls == [Call("F", 4, 4, True)]


def _module(**functions: Any) -> Any:
    module = types.ModuleType("some_flash")
    vars(module).update(functions)
    return module


def test_unfit_packages_are_refused_by_name() -> None:
    good = package("flash4", [])
    with pytest.raises(ValueError, match="train.attention = flash4: some_flash has none of _flash_attn_fwd"):
        PackagedFlashAttention("flash4", _module())
    backward = good._flash_attn_bwd
    with pytest.raises(ValueError, match="needs page_size, which slimpipe does not know; use another"):
        PackagedFlashAttention(
            "flash4", _module(_flash_attn_fwd=lambda q, k, v, page_size: None, _flash_attn_bwd=backward)
        )
    with pytest.raises(ValueError, match="does not take q, k and v"):
        PackagedFlashAttention("flash4", _module(_flash_attn_fwd=lambda qkv=None: None, _flash_attn_bwd=backward))
    without = PackagedFlashAttention(
        "flash4", _module(_flash_attn_fwd=lambda q, k, v: (q, None), _flash_attn_bwd=backward)
    )
    x = torch.randn(1, 4, 2, 8)
    with pytest.raises(RuntimeError, match="gives no LSE"):
        without.forward(x, x, x, causal=True)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_there_is_told_with_the_remedy(name: str) -> None:
    if is_installed(name):
        pytest.skip("it is installed here")
    with pytest.raises(ValueError, match=f"train.attention = {name}: No module named .*, or use auto"):
        load_package(name)
    gpu, half = torch.device("cuda"), torch.bfloat16
    with pytest.raises(ValueError, match=f"train.attention = {name}: its backward is not deterministic"):
        select_backend(name, gpu, half, True)
    with pytest.raises(ValueError, match=f"train.attention = {name}: needs a GPU"):
        select_backend(name, torch.device("cpu"), half, False)
    assert name not in candidates(gpu, half)
    assert list(candidates(gpu, half)) == ["cudnn", "flash"]
    assert list(candidates(gpu, torch.float32)) == list(candidates(torch.device("cpu"), half)) == ["plain"]
