"""The Triton kernels in Triton's interpreter, against their plain forms in float64. Not collected by itself:
tests/kernels/test_triton.py runs it in a process of its own, for the interpreter is chosen before Triton is imported.

The interpreter cuts bf16 off where a GPU rounds: tests/gpu/test_fused.py has the rounding.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slimpipe.kernels.merge import _merge_into, merge_reference
from slimpipe.kernels.norm import add_rms_norm_forward, rms_norm_again, rms_norm_backward, rms_norm_forward
from slimpipe.kernels.rope import rotate_heads, rotate_heads_back
from slimpipe.kernels.swiglu import swiglu_backward, swiglu_forward
from slimpipe.kernels.triton import (
    add,
    add_norm,
    merge,
    norm,
    norm_again,
    norm_forward,
    rope,
    rope_backward,
)
from slimpipe.kernels.triton import swiglu as swiglu_kernel
from slimpipe.kernels.triton import swiglu_backward as swiglu_backward_kernel

DTYPES = [torch.float32, torch.bfloat16]
# Over the number: half of the distance between neighbours, one rounding; all of it for what is cut off.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-7}


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cut_off(x: Tensor) -> Tensor:
    """fp32 to bf16, towards zero."""
    return (x.view(torch.int32) >> 16 << 16).view(torch.float32).bfloat16()


def assert_rounded_once(found: Tensor, exact: Tensor, scale: Tensor | float) -> None:
    """To one rounding of the exact value, and some of fp32 in a sum of terms as large as `scale`."""
    error = (found.double() - exact).abs()
    assert (error <= ROUNDING[found.dtype] * exact.abs() + 32 * ROUNDING[torch.float32] * scale).all(), error.max()


# ---- norm ----


NORMS = [(1, 37, 96), (2, 3, 5, 64), (1, 1, 8), (3, 130), (9, 4096), (2, 5120)]


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", NORMS, ids=str)
def test_the_norms_backward(shape: tuple[int, ...], dtype: torch.dtype, beside: bool) -> None:
    g, x = noise(*shape, dtype=dtype, seed=1), noise(*shape, dtype=dtype, seed=2)
    weight, rstd = noise(shape[-1], dtype=dtype, seed=3), noise(*shape[:-1], 1, seed=4).abs()
    arguments = (g, x, rstd, weight, *([noise(*shape, dtype=dtype, seed=5)] if beside else []))
    assert norm.fits(*arguments)
    dx, dweight = norm.run(*arguments)
    exact_dx, exact_dweight = rms_norm_backward.plain(*(tensor.double() for tensor in arguments))
    assert dx.dtype == dtype and dx.shape == x.shape and dweight.dtype == torch.float32
    assert_rounded_once(dx, exact_dx, exact_dx.abs().amax())
    assert float((dweight.double() - exact_dweight).norm() / exact_dweight.norm()) <= 1e-6
    acc = noise(shape[-1], seed=6)
    total = acc + dweight
    with_acc = (*arguments, *([] if beside else [None]), acc)
    assert norm.fits(*with_acc)
    dx_beside_acc, none = norm.run(*with_acc)
    assert none is None and torch.equal(dx_beside_acc, dx) and torch.equal(acc, total)


def test_a_number_that_is_not_finite_stays_so() -> None:
    """Guards of a step look for it."""
    g, x, weight = noise(6, 64), noise(6, 64, seed=1), noise(64, seed=2)
    g[4, 7] = torch.nan
    dx, dweight = norm.run(g, x, torch.ones(6, 1), weight)
    assert dx[4].isnan().all() and dx[:4].isfinite().all() and dx[5].isfinite().all()
    assert dweight.isnan().nonzero().flatten().tolist() == [7]


def test_norms_that_do_not_fit() -> None:
    g, x, rstd, weight = noise(6, 64), noise(6, 64), torch.ones(6, 1), noise(64)
    assert norm.fits(g, x, rstd, weight)
    assert not norm.fits(g.double(), x.double(), rstd.double(), weight.double())
    assert not norm.fits(g.expand(2, 6, 64), x.expand(2, 6, 64), rstd, weight)
    assert not norm.fits(noise(6 * 64 + 1)[1:].view(6, 64), x, rstd, weight)
    assert not norm.fits(noise(1, 32768), noise(1, 32768), torch.ones(1, 1), noise(32768))
    assert not norm.fits(g[:0], x[:0], rstd[:0], weight)
    assert norm.fits(g, x, rstd, weight, g)
    assert not norm.fits(g, x, rstd, weight, g[:1].expand(6, 64))
    assert norm.fits(g, x, rstd, weight, None, noise(64))
    assert not norm.fits(g, x, rstd, weight, None, noise(64).bfloat16())
    assert not norm.fits(g, x, rstd, weight, None, noise(65)[1:])
    assert not norm.fits(g, x, rstd, weight, noise(6 * 64 + 1)[1:].view(6, 64))
    with torch.enable_grad():
        assert not norm.fits(g, x.requires_grad_(), rstd, weight)
    with torch.no_grad():
        assert norm.fits(g, x.requires_grad_(), rstd, weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", NORMS, ids=str)
def test_the_norm_of_a_sum(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The sum to the bit, and the norm of what it was rounded to."""
    x, delta, weight = (noise(*s, dtype=dtype, seed=i) for i, s in enumerate((shape, shape, shape[-1:])))
    assert add_norm.fits(x, delta, weight, 1e-5)
    h, y, rstd = add_norm.run(x, delta, weight, 1e-5)
    total = x.float() + delta.float()
    assert torch.equal(h, total if dtype == torch.float32 else cut_off(total))
    _, exact, exact_rstd = add_rms_norm_forward.plain(h.double(), torch.zeros_like(h).double(), weight.double(), 1e-5)
    assert y.dtype == dtype and y.shape == x.shape and rstd.shape == (*shape[:-1], 1)
    torch.testing.assert_close(rstd.double(), exact_rstd, rtol=1e-6, atol=0)
    assert_rounded_once(y, exact, exact.abs())


def test_sums_that_do_not_fit() -> None:
    x, weight = noise(6, 64), noise(64)
    assert add_norm.fits(x, x, weight, 1e-5)
    assert not add_norm.fits(x, x.bfloat16(), weight, 1e-5)
    assert not add_norm.fits(x, x[:1], weight, 1e-5)
    assert not add_norm.fits(x, noise(64, 6).T, weight, 1e-5)
    assert not add_norm.fits(x.double(), x.double(), weight.double(), 1e-5)
    with torch.enable_grad():
        assert not add_norm.fits(x, x.clone().requires_grad_(), weight, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", NORMS, ids=str)
def test_the_norm_and_the_norm_again(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The second to the bits of the first, and that to those of a sum's norm."""
    x, weight = noise(*shape, dtype=dtype), noise(shape[-1], dtype=dtype, seed=1)
    assert norm_forward.fits(x, weight, 1e-5)
    y, rstd = norm_forward.run(x, weight, 1e-5)
    exact, exact_rstd = rms_norm_forward.plain(x.double(), weight.double(), 1e-5)
    assert y.dtype == dtype and y.shape == x.shape and rstd.shape == (*shape[:-1], 1)
    torch.testing.assert_close(rstd.double(), exact_rstd, rtol=1e-6, atol=0)
    assert_rounded_once(y, exact, exact.abs())
    assert norm_again.fits(x, rstd, weight)
    again = norm_again.run(x, rstd, weight)
    assert torch.equal(again, y)
    if dtype == torch.float32:
        assert torch.equal(again, rms_norm_again.plain(x, rstd, weight))
    _, of_sum, rstd_of_sum = add_norm.run(x, torch.zeros_like(x), weight, 1e-5)
    assert torch.equal(of_sum, y) and torch.equal(rstd_of_sum, rstd)


def test_norms_alone_that_do_not_fit() -> None:
    x, rstd, weight = noise(6, 64), torch.ones(6, 1), noise(64)
    assert norm_forward.fits(x, weight, 1e-5) and norm_again.fits(x, rstd, weight)
    for other in (x.double(), noise(64, 6).T, noise(6 * 64 + 1)[1:].view(6, 64), x[:0], noise(1, 32768)):
        assert not norm_forward.fits(other, weight, 1e-5) and not norm_again.fits(other, rstd, weight)
    with torch.enable_grad():
        wants = x.clone().requires_grad_()
        assert not norm_forward.fits(wants, weight, 1e-5) and not norm_again.fits(wants, rstd, weight)


# ---- SwiGLU ----


SWIGLUS = [(1, 7, 96), (2, 3, 2080), (5, 16), (16,)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SWIGLUS, ids=str)
def test_swiglu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    *outer, inner = shape
    gate_up, g = noise(*outer, 2 * inner, dtype=dtype), noise(*shape, dtype=dtype, seed=1)
    assert swiglu_kernel.fits(gate_up) and swiglu_backward_kernel.fits(g, gate_up)
    out, gradient = swiglu_kernel.run(gate_up), swiglu_backward_kernel.run(g, gate_up)
    assert out.dtype == gradient.dtype == dtype and out.shape == shape and gradient.shape == gate_up.shape
    assert_rounded_once(out, swiglu_forward.plain(gate_up.double()), 4)
    assert_rounded_once(gradient, swiglu_backward.plain(g.double(), gate_up.double()), 8)


def test_swiglus_that_do_not_fit() -> None:
    gate_up, g = noise(6, 64), noise(6, 32)
    assert swiglu_kernel.fits(gate_up) and swiglu_backward_kernel.fits(g, gate_up)
    for other in (gate_up.double(), noise(64, 6).T, noise(6 * 64 + 1)[1:].view(6, 64), gate_up[:0]):
        assert not swiglu_kernel.fits(other) and not swiglu_backward_kernel.fits(g, other)
    assert not swiglu_kernel.fits(noise(6, 68)) and not swiglu_backward_kernel.fits(noise(6, 34), noise(6, 68))
    assert not swiglu_backward_kernel.fits(g.expand(2, 6, 32), gate_up.expand(2, 6, 64))
    assert not swiglu_backward_kernel.fits(g.bfloat16(), gate_up)
    with torch.enable_grad():
        wants = gate_up.clone().requires_grad_()
        assert not swiglu_kernel.fits(wants) and not swiglu_backward_kernel.fits(g, wants)


# ---- RoPE ----


def tables(tokens: int, d: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(3.0, 3.0 + tokens)[:, None, None] * noise(d // 2, seed=9)
    return angles.cos(), angles.sin()


ROPES = [((1, 19, 4, 2), 64), ((2, 5, 3, 1), 8), ((1, 1, 1, 1), 128), ((2, 33, 2, 2), 24)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "d"), ROPES, ids=str)
def test_rope_of_all_heads(shape: tuple[int, int, int, int], d: int, dtype: torch.dtype) -> None:
    b, s, queries, keys = shape
    heads = (queries, keys, keys)
    cos, sin = tables(s, d)
    qkv = noise(b, s, sum(heads), d, dtype=dtype)
    assert rope.fits(qkv, cos, sin, heads)
    exact = rotate_heads.plain(qkv.double(), cos.double(), sin.double(), heads)
    for found, expected in zip(rope.run(qkv, cos, sin, heads), exact, strict=True):
        assert found.dtype == dtype and found.shape == expected.shape and found.is_contiguous()
        assert_rounded_once(found, expected, 4)


@pytest.mark.parametrize("layout", ["tokens", "heads", "part"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "d"), ROPES, ids=str)
def test_ropes_backward(shape: tuple[int, int, int, int], d: int, dtype: torch.dtype, layout: str) -> None:
    """Gradients laid out by tokens, by heads as a kernel may leave them, or parts of more."""
    b, s, queries, keys = shape

    def gradient(heads: int, seed: int) -> Tensor:
        if layout == "heads":
            return noise(b, heads, s, d, dtype=dtype, seed=seed).transpose(1, 2)
        if layout == "part":
            return noise(b, s + 3, heads + 1, 2 * d, dtype=dtype, seed=seed)[:, 3:, 1:, d:]
        return noise(b, s, heads, d, dtype=dtype, seed=seed)

    cos, sin = tables(s, d)
    gradients = gradient(queries, 1), gradient(keys, 2), gradient(keys, 3)
    assert rope_backward.fits(*gradients, cos, sin)
    found = rope_backward.run(*gradients, cos, sin)
    exact = rotate_heads_back.plain(*(x.double() for x in gradients), cos.double(), sin.double())
    assert found.dtype == dtype and found.shape == exact.shape and found.is_contiguous()
    assert_rounded_once(found, exact, 4)
    assert torch.equal(found[:, :, queries + keys :], gradients[2])


def test_ropes_that_do_not_fit() -> None:
    heads, (cos, sin) = (4, 2, 2), tables(5, 16)
    qkv, dq, dk = noise(1, 5, 8, 16), noise(1, 5, 4, 16), noise(1, 5, 2, 16)
    assert rope.fits(qkv, cos, sin, heads) and rope_backward.fits(dq, dk, dk, cos, sin)
    for other in (qkv.double(), noise(1, 8, 5, 16).transpose(1, 2), noise(1, 5, 8, 32)[..., 16:], qkv[:, :0]):
        assert not rope.fits(other, cos, sin, heads)
    for wrong in (cos[:4], cos.double(), cos.flatten(1), noise(5, 1, 16)[..., ::2]):
        assert not rope.fits(qkv, wrong, sin, heads) and not rope_backward.fits(dq, dk, dk, wrong, sin)
        assert not rope.fits(qkv, cos, wrong, heads) and not rope_backward.fits(dq, dk, dk, cos, wrong)
    assert not rope_backward.fits(dq, dk, dq, cos, sin)
    assert not rope_backward.fits(dq, dk, dk.bfloat16(), cos, sin)
    assert not rope_backward.fits(noise(1, 5, 4, 1).expand(1, 5, 4, 16), dk, dk, cos, sin)
    assert not rope_backward.fits(dq, dk, noise(1, 5, 2, 20)[..., :16], cos, sin)
    with torch.enable_grad():
        assert not rope.fits(qkv.clone().requires_grad_(), cos, sin, heads)
        assert not rope_backward.fits(dq, dk, dk.clone().requires_grad_(), cos, sin)


# ---- merge ----


def merged(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    out = torch.full(outs[0].shape, torch.nan, dtype=outs[0].dtype)
    assert merge.fits(outs, lses, out)
    return out, merge.run(outs, lses, out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("shape", [(1, 17, 4, 128), (2, 5, 3, 64), (1, 1, 1, 40), (2, 8, 9, 16)], ids=str)
def test_the_merge(shape: tuple[int, ...], count: int, dtype: torch.dtype) -> None:
    b, s, h, d = shape
    outs = [noise(*shape, dtype=dtype, seed=i) for i in range(count)]
    lses = [3 * noise(b, h, s, seed=10 + i) for i in range(count)]
    out, lse = merged(outs, lses)
    exact, exact_lse = merge_reference([x.double() for x in outs], [x.double() for x in lses])
    assert_rounded_once(out, exact, 4)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-6)


def test_partials_of_any_strides() -> None:
    b, s, h, d = 2, 11, 3, 32
    plain, heads_first = noise(b, s, h, d), noise(b, h, s, d, seed=1).transpose(1, 2)
    part_of_more = noise(b, s + 3, h, 2 * d, seed=2)[:, 3:, :, d:]
    outs, lses = [plain, heads_first, part_of_more], [noise(b, h, s, seed=i) for i in range(3)]
    out, lse = merged(outs, lses)
    exact, exact_lse = merge_reference([x.double() for x in outs], [x.double() for x in lses])
    assert_rounded_once(out, exact, 4)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_queries_without_keys(count: int) -> None:
    outs = [noise(1, 9, 2, 16, seed=i) for i in range(count)]
    lses = [noise(1, 2, 9, seed=i) for i in range(count)]
    for i in range(count):  # in one partial at a time, then in all
        lses[i][:, :, i] = lses[i][:, :, 8] = -torch.inf
        outs[i][:, i] = outs[i][:, 8] = torch.nan
    out, lse = merged(outs, lses)
    expected, expected_lse = merge_reference(outs, lses)
    assert out.isfinite().all() and (out[:, 8] == 0).all()
    assert (lse[:, :, 8] == -torch.inf).all() and lse[:, :, :8].isfinite().all()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-6)


def test_numbers_that_are_not_finite_stay_so() -> None:
    outs, lses = [noise(1, 9, 2, 16, seed=i) for i in range(2)], [noise(1, 2, 9, seed=i) for i in range(2)]
    outs[0][0, 3, 1, 5] = torch.nan
    lses[1][0, 0, 6] = torch.nan
    out, lse = merged(outs, lses)
    assert out.isnan().any(-1).nonzero().tolist() == [[0, 3, 1], [0, 6, 0]]
    assert lse.isnan().nonzero().tolist() == [[0, 0, 6]]


def test_partials_that_do_not_fit() -> None:
    def parts(count: int, dtype: torch.dtype = torch.float32, d: int = 16) -> tuple[list[Tensor], list[Tensor], Tensor]:
        outs = [noise(1, 9, 2, d, dtype=dtype) for _ in range(count)]
        return outs, [noise(1, 2, 9) for _ in range(count)], torch.empty_like(outs[0])

    assert merge.fits(*parts(2))
    assert not merge.fits(*parts(1)) and not merge.fits(*parts(5))
    assert (
        not merge.fits(*parts(2, torch.float64))
        and not merge.fits(*parts(2, d=12))
        and not merge.fits(*parts(2, d=512))
    )
    outs, lses, out = parts(2)
    assert not merge.fits([outs[0], noise(1, 9, 16, 2).transpose(2, 3)], lses, out)
    assert not merge.fits(outs, [lses[0], noise(1, 9, 2).transpose(1, 2)], out)
    assert not merge.fits([outs[0], noise(9 * 32 + 2)[2:].view(1, 9, 2, 16)], lses, out)
    with torch.enable_grad():
        assert not merge.fits([outs[0], outs[1].requires_grad_()], lses, out)
    with torch.no_grad():
        assert torch.equal(_merge_into(outs, lses, out), merge_reference(outs, lses)[1])  # plain, on the CPU


# ---- sums ----


@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("tokens", [(0, 8), (3, 4), (5, 700)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["first", "add", "rounded"])
def test_sums_of_pairs(kind: str, dtype: torch.dtype, tokens: tuple[int, int], b: int) -> None:
    """To the bit; nothing else of the buffers is touched."""
    start, stop = tokens
    parts = tuple(noise(b, stop - start + 2, 2, 12, dtype=dtype, seed=i)[:, 1:-1] for i in range(2))
    buffers = [noise(b, 800, 2, 12, seed=5 + i) for i in range(2)]
    accs = tuple(buffer[:, start:stop] for buffer in buffers)
    sums = [part.float() if kind == "first" else acc + part for acc, part in zip(accs, parts, strict=True)]
    outs = tuple(torch.empty(parts[0].shape, dtype=dtype) for _ in range(2)) if kind == "rounded" else accs
    expected = [buffer.clone() for buffer in buffers]
    for buffer, total in zip(expected, sums, strict=True):
        if kind != "rounded":
            buffer[:, start:stop] = total
    arguments = (parts, None if kind == "first" else accs, outs)
    assert add.fits(*arguments)
    add.run(*arguments)
    for found, buffer, out, total in zip(buffers, expected, outs, sums, strict=True):
        assert torch.equal(found, buffer)
        assert out.dtype != torch.bfloat16 or torch.equal(out, total.bfloat16()) or torch.equal(out, cut_off(total))
        assert out.dtype == torch.bfloat16 or torch.equal(out, total)


def test_pairs_that_do_not_fit() -> None:
    acc, part = noise(2, 9, 2, 8), noise(2, 9, 2, 8, dtype=torch.bfloat16)
    assert add.fits((part, part), (acc, acc), (acc, acc))
    heads_first = noise(2, 2, 9, 8, dtype=torch.bfloat16).transpose(1, 2)
    assert not add.fits((part, heads_first), (acc, acc), (acc, acc))
    assert not add.fits((part, part), (acc.double(), acc.double()), (acc, acc))
    assert not add.fits((part, part), (acc, acc), (acc, acc.bfloat16()))
    assert not add.fits((part[:, :0], part[:, :0]), (acc[:, :0], acc[:, :0]), (acc[:, :0], acc[:, :0]))
    short = noise(2, 9, 2, 7, dtype=torch.bfloat16)
    assert not add.fits((short, short), None, (short, short))
