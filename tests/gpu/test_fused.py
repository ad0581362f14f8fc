"""Every fused function, compiled and by Triton, against its own plain form on the same GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from slimpipe.kernels import cross_entropy, merge, norm, rope, sums, swiglu
from slimpipe.kernels.weight_grad import add_matmul

pytestmark = pytest.mark.gpu


def noise(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def cases() -> dict[str, tuple[Any, Callable[[], tuple[Any, ...]]]]:
    x, g, w = (1, 512, 1024), (1, 512, 1024), (1024,)
    angles = torch.arange(512.0)[:, None, None] * torch.rand(64)
    rstd = lambda: noise(1, 512, 1, dtype=torch.float32).abs()  # noqa: E731
    labels = torch.randint(0, 4096, (512,))
    labels[::7] = -100
    return {
        "norm forward": (norm.rms_norm_forward, lambda: (noise(*x), noise(*w), 1e-5)),
        "norm again": (norm.rms_norm_again, lambda: (noise(*x), rstd(), noise(*w))),
        "norm backward": (norm.rms_norm_backward, lambda: (noise(*g), noise(*x), rstd(), noise(*w))),
        "norm and residual backward": (
            norm.rms_norm_backward,
            lambda: (noise(*g), noise(*x), rstd(), noise(*w), noise(512, *w)[None]),
        ),
        "swiglu forward": (swiglu.swiglu_forward, lambda: (noise(1, 512, 2048),)),
        "rope": (rope.rotate, lambda: (noise(1, 512, 8, 128), angles.cos().cuda(), angles.sin().cuda())),
        "cross-entropy statistics": (
            cross_entropy.shard_statistics,
            lambda: (noise(512, 4096), labels.cuda(), 0, 4000),
        ),
    }


@pytest.mark.parametrize("name", list(cases()))
def test_compiled_equals_plain(name: str) -> None:
    function, make = cases()[name]
    compiled, plain = function.compiled(*make()), function.plain(*make())
    for a, b in zip(_tuple(compiled), _tuple(plain), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        # Both compute in fp32 and round once; sums may be taken in another order.
        bound = 1e-5 if a.dtype == torch.float32 else 5e-3
        assert float((a.double() - b.double()).norm() / b.double().norm()) <= bound


def test_the_gradient_of_a_shards_logits_compiled_equals_plain() -> None:
    labels = torch.randint(0, 8192, (512,)).cuda()
    labels[::7] = -100
    lse = noise(512, dtype=torch.float32) + 9
    arguments = (labels, lse, torch.tensor(1e-3, device="cuda"), 4096, 4000, 8192, 1e-4, 0.1)
    compiled, plain = noise(512, 4096), noise(512, 4096)
    cross_entropy.shard_gradient.compiled(compiled, *arguments)
    cross_entropy.shard_gradient.plain(plain, *arguments)
    assert float((compiled.double() - plain.double()).norm() / plain.double().norm()) <= 5e-3
    assert (plain[:, 4000:] == 0).all() and (plain[::7] == 0).all()


def test_the_backward_of_swiglu_compiled_equals_plain() -> None:
    g, gate_up = noise(512, 1024), noise(512, 2048)
    compiled, plain = torch.empty_like(gate_up), torch.empty_like(gate_up)
    swiglu.swiglu_backward_into.compiled(g, gate_up, *compiled.chunk(2, -1))
    swiglu.swiglu_backward_into.plain(g, gate_up, *plain.chunk(2, -1))
    assert float((compiled.double() - plain.double()).norm() / plain.double().norm()) <= 5e-3


# ---- Triton ----

NORMS = [(1, 512, 1024), (1, 777, 4096), (2, 300, 32, 128), (1, 64, 5120), (1, 300, 8192), (1, 40, 16384), (3, 130)]


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", NORMS, ids=str)
def test_the_norms_backward_by_triton(shape: tuple[int, ...], dtype: torch.dtype, beside: bool) -> None:
    g, x = noise(*shape, dtype=dtype), noise(*shape[:-1], shape[-1] + 1, dtype=dtype)[..., 1:].contiguous()
    arguments = [g, x, noise(*shape[:-1], 1, dtype=torch.float32).abs(), noise(shape[-1], dtype=dtype)]
    if beside:
        arguments.append(noise(*shape[:-1], shape[-1] + 2, dtype=dtype)[..., 2:].contiguous())
    dx, dweight = by_triton(norm.rms_norm_backward, *arguments)
    exact_dx, exact_dweight = norm.rms_norm_backward.plain(*(tensor.double() for tensor in arguments))
    assert exact_dweight is not None
    plain_dx, _ = norm.rms_norm_backward.plain(*arguments)
    assert dx.dtype == dtype and dweight.dtype == torch.float32
    # No more of the numbers fall to the other neighbour than in the plain form.
    assert off(dx, exact_dx) <= 1.02 * off(plain_dx, exact_dx) + 2e-7
    assert off(dweight, exact_dweight) <= 1e-6
    again = by_triton(norm.rms_norm_backward, *arguments)
    assert torch.equal(again[0], dx) and torch.equal(again[1], dweight)
    acc = noise(shape[-1], dtype=torch.float32)
    total = acc + dweight
    beside_or_none = arguments[4] if beside else None
    added = by_triton(norm.rms_norm_backward, *arguments[:4], beside_or_none, acc)
    assert torch.equal(added[0], dx) and added[1] is None and torch.equal(acc, total)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", NORMS, ids=str)
def test_the_norm_of_a_sum_by_triton(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, delta = noise(*shape, dtype=dtype), noise(*shape[:-1], shape[-1] + 1, dtype=dtype)[..., 1:].contiguous()
    weight = noise(shape[-1], dtype=dtype)
    h, y, rstd = by_triton(norm.add_rms_norm_forward, x, delta, weight, 1e-5)
    assert torch.equal(h, x + delta)
    # What `memory.recompute: norms` makes again, to the bit.
    assert torch.equal(y, norm.rms_norm_again.plain(h, rstd, weight))
    assert torch.equal(y, norm.rms_norm_again.compiled(h, rstd, weight))
    exact, exact_rstd = norm.rms_norm_forward.plain(h.double(), weight.double(), 1e-5)
    plain, _ = norm.rms_norm_forward.plain(h, weight, 1e-5)
    assert off(y, exact) <= 1.02 * off(plain, exact) + 2e-7
    torch.testing.assert_close(rstd.double(), exact_rstd, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", NORMS, ids=str)
def test_the_norm_and_the_norm_again_by_triton(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = noise(*shape, dtype=dtype), noise(shape[-1], dtype=dtype)
    y, rstd = by_triton(norm.rms_norm_forward, x, weight, 1e-5)
    for again in (norm.rms_norm_again.plain(x, rstd, weight), norm.rms_norm_again.compiled(x, rstd, weight)):
        assert torch.equal(y, again)
    assert torch.equal(y, by_triton(norm.rms_norm_again, x, rstd, weight))
    exact, exact_rstd = norm.rms_norm_forward.plain(x.double(), weight.double(), 1e-5)
    plain, _ = norm.rms_norm_forward.plain(x, weight, 1e-5)
    assert off(y, exact) <= 1.02 * off(plain, exact) + 2e-7
    torch.testing.assert_close(rstd.double(), exact_rstd, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 512, 14336), (2, 77, 1040), (3, 16)], ids=str)
def test_swiglu_by_triton(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gate_up, g = noise(*shape[:-1], 2 * shape[-1], dtype=dtype), noise(*shape, dtype=dtype)
    for function, arguments in ((swiglu.swiglu_forward, (gate_up,)), (swiglu.swiglu_backward, (g, gate_up))):
        found, plain = by_triton(function, *arguments), function.plain(*arguments)
        exact = function.plain(*(tensor.double() for tensor in arguments))
        assert found.dtype == dtype and found.shape == exact.shape
        assert off(found, exact) <= 1.02 * off(plain, exact) + 5e-7
        assert torch.equal(found, by_triton(function, *arguments))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("d", [128, 64, 24])
def test_rope_of_all_heads_by_triton(d: int, dtype: torch.dtype) -> None:
    b, s, heads = 2, 333, (6, 2, 2)
    angles = torch.arange(float(s), device="cuda")[:, None, None] * torch.rand(d // 2, device="cuda")
    cos, sin = angles.cos(), angles.sin()
    forward = (noise(b, s, sum(heads), d, dtype=dtype), cos, sin, heads)
    by_heads = noise(b, heads[0], s, d, dtype=dtype).transpose(1, 2)
    part_of_more = noise(b, s + 3, heads[1], d, dtype=dtype)[:, 3:]
    backward = (by_heads, part_of_more, noise(b, s, heads[2], d, dtype=dtype), cos, sin)
    for function, arguments in ((rope.rotate_heads, forward), (rope.rotate_heads_back, backward)):
        wide = [x.double() if isinstance(x, Tensor) else x for x in arguments]
        found = _tuple(by_triton(function, *arguments))
        for a, p, e in zip(found, *(_tuple(function.plain(*x)) for x in (arguments, wide)), strict=True):
            assert a.dtype == dtype and a.shape == e.shape and a.is_contiguous()
            assert off(a, e) <= 1.02 * off(p, e) + 2e-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_the_merge_by_triton(parts: int, dtype: torch.dtype) -> None:
    b, s, h, d = 2, 517, 6, 96
    layouts = [
        noise(b, s, h, d, dtype=dtype),
        noise(b, h, s, d, dtype=dtype).transpose(1, 2),
        noise(b, s + 3, h, 2 * d, dtype=dtype)[:, 3:, :, d:],
        noise(b, s, 2 * h, d, dtype=dtype)[:, :, ::2],
    ]
    outs = layouts[-parts:]
    lses = [3 * noise(b, h, s + i, dtype=torch.float32)[..., i:].contiguous() for i in range(parts)]
    lses[1][:, :, 5] = lses[0][:, :, 7] = -torch.inf
    for lse, partial in zip(lses, outs, strict=True):
        lse[:, :, 9] = -torch.inf
        partial[:, 9] = torch.nan
    outs[1][:, 5] = torch.nan
    out = torch.empty(b, s, h, d, dtype=dtype, device="cuda")
    lse = by_triton(merge._merge_into, outs, lses, out)
    exact, exact_lse = merge.merge_reference([x.double() for x in outs], [x.double() for x in lses])
    plain, _ = merge.merge_reference(outs, lses)
    assert (out[:, 9] == 0).all() and (lse[:, :, 9] == -torch.inf).all()
    assert off(out, exact) <= 1.02 * off(plain, exact) + 1e-6
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["first", "add", "rounded"])
def test_sums_of_pairs_by_triton_are_the_plain_ones_to_the_bit(kind: str) -> None:
    parts = noise(2, 300, 8, 128)[:, 7:], noise(2, 296, 8, 128)[:, 3:]
    found = [noise(2, 900, 8, 128, dtype=torch.float32) for _ in range(2)]
    expected = [acc.clone() for acc in found]
    outs = {}
    for name, buffers in (("triton", found), ("plain", expected)):
        accs = tuple(buffer[:, 11:304] for buffer in buffers)
        rounded = tuple(torch.empty(part.shape, dtype=part.dtype, device="cuda") for part in parts)
        outs[name] = rounded if kind == "rounded" else accs
        arguments: tuple[Any, ...] = (parts, None if kind == "first" else accs, outs[name])
        by_triton(sums.add_pairs, *arguments) if name == "triton" else sums.add_pairs.plain(*arguments)
    for a, b in zip((*found, *outs["triton"]), (*expected, *outs["plain"]), strict=True):
        assert torch.equal(a, b)


def test_triton_compiles_one_code_for_all_pasts() -> None:
    """What tests/kernels/test_triton.py reckons, counted."""
    from slimpipe.kernels.triton.add import _add

    acc = noise(1, 4100, 8, 128, dtype=torch.float32)
    cache = _add.device_caches[torch.cuda.current_device()][0]
    counts = []
    for length in (1, 2, 16, 17, 250, 4096):
        part = noise(1, length, 8, 128)
        for start in (0, 1, 4):
            accs = acc[:, start : start + length], acc[:, start : start + length].clone()
            by_triton(sums.add_pairs, (part, part), accs, accs)
            counts.append(len(cache))
    assert counts == counts[:1] * len(counts)


def by_triton(function: Any, *arguments: Any) -> Any:
    assert function.triton is not None and function.triton.fits(*arguments)
    return function.triton.run(*arguments)


def off(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def _tuple(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def test_merge_on_the_gpu_equals_the_reference() -> None:
    outs = [noise(1, 512, 8, 128), noise(1, 512, 8, 64 + 64)]
    lses = [noise(1, 8, 512, dtype=torch.float32), noise(1, 8, 512, dtype=torch.float32) - 2]
    lses[1][:, :, 5] = float("-inf")
    out, lse = merge.merge(outs, lses)
    expected, expected_lse = merge.merge_reference([x.double() for x in outs], [x.double() for x in lses])
    assert float((out.double() - expected).norm() / expected.norm()) <= 3e-3
    assert torch.allclose(lse.double(), expected_lse.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_sums_of_parts_are_rounded_once(count: int) -> None:
    parts = [noise(1, 512, 8, 128 * (i + 1))[..., :128] for i in range(count)]
    total = torch.stack(parts).double().sum(0)
    found = sums.sum_rounded(parts)
    assert found.dtype == torch.bfloat16
    # To the neighbouring number at most where fp32 and fp64 fall on different sides of a tie.
    assert float((found.double() - total).norm() / total.norm()) <= 2e-3


def test_a_sum_is_rounded_once_as_it_is_stored() -> None:
    acc, part = noise(1, 512, 8, 128, dtype=torch.float32)[:, 128:256], noise(1, 512, 8, 128)[:, 128:256]
    for total in sums.add_rounded((acc, acc), (part, part)):
        assert torch.equal(total, (acc + part.float()).bfloat16())


def test_weight_gradients_add_up_in_fp32() -> None:
    """64 small gradients on top of a large one, where sums in bf16 lose nearly all."""
    acc = torch.full((256, 128), 1000.0, device="cuda")
    low, added = acc.bfloat16(), torch.zeros_like(acc, dtype=torch.float64)
    for step in range(64):
        generator = torch.Generator("cuda").manual_seed(step)
        g, x = (torch.randn(512, n, generator=generator, device="cuda").bfloat16() * 0.01 for n in (256, 128))
        add_matmul(acc, g, x)
        low += g.T @ x
        added += g.double().T @ x.double()
    size = float(added.norm())
    # fp32 near 1000 resolves 6e-5: 64 roundings of what is added (0.018 an entry) come to about 1 % of it.
    assert float((acc.double() - 1000 - added).norm()) <= 0.02 * size
    assert float((low.double() - 1000 - added).norm()) >= 0.5 * size
