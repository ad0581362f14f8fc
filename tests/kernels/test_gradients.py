"""Every hand-written backward against autograd on the same mathematics, in float64, and weight gradients in fp32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slimpipe.kernels.attention import PlainAttention, select_backend
from slimpipe.kernels.cross_entropy import Loss, linear_cross_entropy, linear_token_losses
from slimpipe.kernels.embedding import add_shard_gradient, embedding, shard_embedding
from slimpipe.kernels.linear import linear
from slimpipe.kernels.mlp import add_norm_swiglu, norm_swiglu
from slimpipe.kernels.norm import (
    add_norm_linear,
    add_rms_norm_forward,
    norm_linear,
    rms_norm,
    rms_norm_again,
    rms_norm_backward,
)
from slimpipe.kernels.rope import inverse_frequencies, rope, rope_of_heads, rope_table
from slimpipe.kernels.sums import add_rounded, sum_rounded
from slimpipe.kernels.swiglu import swiglu_linear
from slimpipe.kernels.twice import recomputed
from slimpipe.kernels.weight_grad import add_matmul
from slimpipe.parallel.gradients import GradientBuffer
from slimpipe.runtime.kv_slots import LayerSlots, SlicePlace
from slimpipe.runtime.sliced_attention import sliced_attention

EPS = 1e-5


def noise(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def plain_swiglu(gate_up: Tensor, weight: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return (F.silu(gate) * up) @ weight.T


def plain_rope(x: Tensor) -> Tensor:
    angles = torch.arange(5, 12, dtype=torch.float64)[:, None] * 10000.0 ** (-torch.arange(0, 8, 2).double() / 8)
    turned = (
        torch.view_as_complex(torch.stack(x.chunk(2, -1), -1)) * torch.polar(torch.ones_like(angles), angles)[:, None]
    )
    return torch.cat((turned.real, turned.imag), -1)


def our_rope(x: Tensor) -> Tensor:
    cos, sin = rope_table(torch.arange(5, 12), inverse_frequencies(8, 10000.0, None, x.device).double())
    return rope(x, cos, sin)


PAIRS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]] = {
    "linear": (linear, lambda x, w: x @ w.T, [noise(2, 3, 8), noise(5, 8)]),
    "norm": (lambda x, w: rms_norm(x, w, EPS), plain_norm, [noise(2, 3, 8), noise(8)]),
    "norm of one token": (lambda x, w: rms_norm(x, w, EPS), plain_norm, [noise(8), noise(8)]),
    "norm and linear of one token": (
        lambda x, n, w: norm_linear(x, n, w, EPS, True),
        lambda x, n, w: plain_norm(x, n) @ w.T,
        [noise(8), noise(8), noise(5, 8)],
    ),
    "norm and linear, kept": (
        lambda x, n, w: norm_linear(x, n, w, EPS, False),
        lambda x, n, w: plain_norm(x, n) @ w.T,
        [noise(2, 3, 8), noise(8), noise(5, 8)],
    ),
    "norm and linear, made again": (
        lambda x, n, w: norm_linear(x, n, w, EPS, True),
        lambda x, n, w: plain_norm(x, n) @ w.T,
        [noise(2, 3, 8), noise(8), noise(5, 8)],
    ),
    "swiglu, kept": (lambda x, w: swiglu_linear(x, w, False), plain_swiglu, [noise(2, 3, 12), noise(4, 6)]),
    "swiglu, made again": (lambda x, w: swiglu_linear(x, w, True), plain_swiglu, [noise(2, 3, 12), noise(4, 6)]),
    "swiglu of one token": (lambda x, w: swiglu_linear(x, w, True), plain_swiglu, [noise(12), noise(4, 6)]),
    "norm and swiglu": (
        lambda x, n, u, d: norm_swiglu(x, n, u, d, EPS),
        lambda x, n, u, d: plain_swiglu(plain_norm(x, n) @ u.T, d),
        [noise(2, 3, 8), noise(8), noise(12, 8), noise(4, 6)],
    ),
    "rope": (our_rope, plain_rope, [noise(2, 7, 3, 8)]),
}


@pytest.mark.parametrize("name", PAIRS)
def test_value_and_gradients_are_autograds(name: str) -> None:
    ours, plain, inputs = PAIRS[name]
    found, expected = ours(*inputs), plain(*inputs)
    torch.testing.assert_close(
        found, expected, rtol=1e-5 if name == "rope" else 1e-12, atol=1e-6 if name == "rope" else 0
    )
    g = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for a, b in zip(torch.autograd.grad(found, inputs, g), torch.autograd.grad(expected, inputs, g), strict=True):
        assert float((a - b).norm() / b.norm()) <= (1e-6 if name == "rope" else 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(3, 1, 1), (2, 2, 2)], ids=str)
def test_rope_of_all_heads_is_that_of_each_to_the_bit(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    cos, sin = rope_table(torch.arange(5, 12), inverse_frequencies(8, 10000.0, None, torch.device("cpu")))
    qkv = noise(2, 7, sum(heads) * 8).detach().to(dtype).requires_grad_()
    q, k, v = qkv.unflatten(-1, (-1, 8)).split(heads, 2)
    expected = rope(q, cos, sin), rope(k, cos, sin), v
    found = rope_of_heads(qkv, cos, sin, heads)
    # Of keys as attention leaves them, by heads.
    gradients = [noise(2, n, 7, 8).detach().to(dtype).transpose(1, 2) for n in heads]
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b) and a.requires_grad
    assert torch.equal(*(torch.autograd.grad(outs, qkv, gradients)[0] for outs in (found, expected)))


# ---- the residual stream beside a norm ----

WITH_STREAM: dict[str, tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., Tensor], list[Tensor]]] = {
    "linear, kept": (
        lambda x, delta, n, w: add_norm_linear(x, delta, n, w, EPS, False),
        lambda h, n, w: plain_norm(h, n) @ w.T,
        [noise(8), noise(5, 8)],
    ),
    "linear, made again": (
        lambda x, delta, n, w: add_norm_linear(x, delta, n, w, EPS, True),
        lambda h, n, w: plain_norm(h, n) @ w.T,
        [noise(8), noise(5, 8)],
    ),
    "swiglu": (
        lambda x, delta, n, u, d: add_norm_swiglu(x, delta, n, u, d, EPS),
        lambda h, n, u, d: plain_swiglu(plain_norm(h, n) @ u.T, d),
        [noise(8), noise(12, 8), noise(8, 6)],
    ),
    "swiglu, for its backward alone": (
        lambda x, delta, n, u, d: add_norm_swiglu(x, delta, n, u, d, EPS, value=False),
        lambda h, n, u, d: plain_swiglu(plain_norm(h, n) @ u.T, d),
        [noise(8), noise(12, 8), noise(8, 6)],
    ),
}


@pytest.mark.parametrize("used", ["both", "the value", "the stream"])
@pytest.mark.parametrize("with_delta", [True, False])
@pytest.mark.parametrize("name", WITH_STREAM)
def test_the_streams_gradient_is_taken_up_once(name: str, with_delta: bool, used: str) -> None:
    ours, plain, weights = WITH_STREAM[name]
    # As in a model: inputs that are no leaves.
    x, delta = noise(2, 3, 8) * 1, noise(3, 2, 8).view(2, 3, 8) if with_delta else None
    value, h = ours(x, delta, *weights)
    expected_h = x if delta is None else x + delta
    expected = plain(expected_h, *weights)
    assert torch.equal(h, expected_h)
    if "alone" not in name:
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    kept = slice(0, 1) if used == "the value" else slice(1, 2) if used == "the stream" else slice(0, 2)
    gradients = tuple(
        torch.randn(t.shape, generator=torch.Generator().manual_seed(i)).double() for i, t in enumerate((value, h))
    )[kept]
    inputs = [t for t in (x, delta, *weights) if t is not None]
    found = torch.autograd.grad((value, h)[kept], inputs, gradients, allow_unused=True)
    wanted = torch.autograd.grad((expected, expected_h)[kept], inputs, gradients, allow_unused=True)
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        assert a is None or b is None or float((a - b).norm() / b.norm()) <= 1e-12


def test_without_gradients_the_stream_requires_none() -> None:
    """A view of a tensor that requires one would say so itself."""
    with torch.no_grad():
        for value, h in (
            add_norm_linear(noise(3, 8), None, noise(8), noise(5, 8), EPS, True),
            add_norm_swiglu(noise(3, 8), None, noise(8), noise(12, 8), noise(8, 6), EPS),
        ):
            assert not value.requires_grad and not h.requires_grad


def test_sums_beside_a_norm_in_bf16() -> None:
    """The norm is that of the rounded sum, to the bit; the sum of gradients is rounded once."""
    x, delta, g, beside = (noise(64, 8 + i)[:, :8].detach().bfloat16() for i in range(4))
    weight = noise(8).detach().bfloat16()
    h, y, rstd = add_rms_norm_forward(x, delta, weight, EPS)
    assert torch.equal(h, x + delta) and torch.equal(y, rms_norm_again(h, rstd, weight))
    found, dweight = rms_norm_backward(g, h, rstd, weight, beside)
    exact, _ = rms_norm_backward(*(t.float() for t in (g, h, rstd, weight)))
    apart, alone = rms_norm_backward(g, h, rstd, weight)
    assert torch.equal(found, (exact + beside).bfloat16()) and torch.equal(dweight, alone)
    acc = torch.full((8,), 3.0)
    assert torch.equal(rms_norm_backward(g, h, rstd, weight, beside, acc)[0], found)
    assert torch.equal(acc, 3.0 + alone)
    assert not torch.equal(found, apart + beside)


# ----


def attention_of_a_slice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sliced_attention(q, k, v, LayerSlots(1, 3, False), SlicePlace(0, (), last=True), PlainAttention())


ONCE: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    name: (PAIRS[name][0], PAIRS[name][2])
    for name in ("norm", "norm and linear, kept", "swiglu, kept", "swiglu, made again", "norm and swiglu")
}
ONCE["attention of a slice"] = attention_of_a_slice, [noise(1, 3, 4, 8), noise(1, 3, 2, 8), noise(1, 3, 2, 8)]
ONCE["a part that runs twice"] = lambda x: recomputed(torch.sin, x), [noise(2, 3)]


@pytest.mark.parametrize("name", ONCE)
def test_gradients_of_gradients_are_refused(name: str) -> None:
    """They would lack what goes through statistics and weights; first gradients come with `create_graph` too."""
    ours, inputs = ONCE[name]
    (expected,) = torch.autograd.grad(ours(*inputs).square().sum(), inputs[:1])
    (first,) = torch.autograd.grad(ours(*inputs).square().sum(), inputs[:1], create_graph=True)
    assert torch.equal(first, expected)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_embedding_and_its_shards() -> None:
    weight, tokens = noise(7, 4), torch.tensor([[0, 6, 3, 3], [5, 1, 6, 0]])
    g = noise(2, 4, 4).detach()
    whole = embedding(tokens, weight)
    (expected,) = torch.autograd.grad(F.embedding(tokens, weight), weight, g)
    assert torch.equal(torch.autograd.grad(whole, weight, g)[0], expected)
    padded = torch.cat([weight.detach(), torch.zeros(2, 4, dtype=torch.float64)])
    shards = list(padded.split(3))
    assert torch.equal(sum(shard_embedding(tokens, shard, 3 * i) for i, shard in enumerate(shards)), whole)
    accumulated = [torch.zeros_like(shard) for shard in shards]
    for index, acc in enumerate(accumulated):
        add_shard_gradient(acc, tokens, g, 3 * index)
    assert torch.equal(torch.cat(accumulated)[:7], expected)
    assert (torch.cat(accumulated)[7:] == 0).all()


@pytest.mark.parametrize("loss", [Loss(), Loss(z_loss=0.01), Loss(smoothing=0.1), Loss(z_loss=1e-3, smoothing=0.05)])
@pytest.mark.parametrize("chunk", [3, 5, 100])
def test_cross_entropy(chunk: int, loss: Loss) -> None:
    hidden, weight = noise(2, 7, 6), noise(11, 6)
    labels = torch.randint(11, (2, 7), generator=torch.Generator().manual_seed(2))
    labels[0, 2:5] = -100
    scale = torch.tensor(0.25, dtype=torch.float64)
    logits = hidden @ weight.T
    expected = 0.25 * F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=loss.smoothing
    )
    expected = expected + 0.25 * loss.z_loss * logits.logsumexp(-1)[labels != -100].square().sum()
    found = linear_cross_entropy(hidden, weight, labels, scale, chunk, loss)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    pairs = zip(
        torch.autograd.grad(found, [hidden, weight]), torch.autograd.grad(expected, [hidden, weight]), strict=True
    )
    for a, b in pairs:
        assert float((a - b).norm() / b.norm()) <= 1e-12
    tokens = linear_token_losses(hidden.detach(), weight.detach(), labels, chunk, loss)
    torch.testing.assert_close(tokens.sum() * 0.25, expected.detach(), rtol=1e-12, atol=0)
    assert (tokens[labels == -100] == 0).all()


def test_a_slice_without_a_valid_token_adds_exactly_zero() -> None:
    hidden, weight = noise(1, 4, 6), noise(11, 6)
    labels = torch.full((1, 4), -100)
    loss = linear_cross_entropy(hidden, weight, labels, torch.tensor(0.1, dtype=torch.float64), 3, Loss(0.1, 0.1))
    assert loss == 0
    assert all((gradient == 0).all() for gradient in torch.autograd.grad(loss, [hidden, weight]))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_plain_attention_is_sdpa(kv_heads: int, causal: bool) -> None:
    q, k, v = noise(2, 6, 4, 8), noise(2, 6 if causal else 9, kv_heads, 8), noise(2, 6 if causal else 9, kv_heads, 8)
    wide = [
        x.transpose(1, 2) for x in (q, k.repeat_interleave(4 // kv_heads, 2), v.repeat_interleave(4 // kv_heads, 2))
    ]
    expected = F.scaled_dot_product_attention(*wide, is_causal=causal).transpose(1, 2)
    backend = PlainAttention()
    out, lse = backend.forward(q, k, v, causal)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = backend.backward(g, q.detach(), k.detach(), v.detach(), out.detach(), lse.detach(), causal)
    for a, b in zip(found, torch.autograd.grad(expected, [q, k, v], g), strict=True):
        assert float((a - b).norm() / b.norm()) <= 1e-10


def test_gradients_of_plain_modules_land_in_main_grad() -> None:
    """A torch.nn layer in a user's model makes its gradient the usual way; it is added up in fp32 and dropped."""
    layer = torch.nn.Linear(4, 3).bfloat16()
    buffer = GradientBuffer(dict(layer.named_parameters()))
    x = torch.randn(5, 4).bfloat16()
    for _ in range(2):
        layer(x).sum().backward()
    assert layer.weight.grad is None
    assert buffer.views()["weight"].dtype == torch.float32
    torch.testing.assert_close(buffer.views()["weight"], 2 * x.float().sum(0).expand(3, 4), rtol=1e-2, atol=1e-2)
    buffer.zero()
    assert not buffer.buffer.any()


def test_bf16_products_are_added_up_in_fp32() -> None:
    """64 small gradients on top of a large one, where sums in bf16 lose nearly all."""
    acc, added = torch.full((6, 5), 1000.0), torch.zeros(6, 5, dtype=torch.float64)
    low = acc.bfloat16()
    for step in range(64):
        generator = torch.Generator().manual_seed(step)
        g, x = (torch.randn(7, n, generator=generator).bfloat16() * 0.1 for n in (6, 5))
        add_matmul(acc, g, x)
        low += g.T @ x
        added += g.double().T @ x.double()
    assert float((acc.double() - 1000 - added).norm()) <= 0.01 * float(added.norm())
    assert float((low.double() - 1000 - added).norm()) >= 0.5 * float(added.norm())


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_parts_are_summed_and_rounded_once(count: int) -> None:
    parts = [
        torch.randn(2, 5, 3, 2 * (i + 1), generator=torch.Generator().manual_seed(i))[..., :2] for i in range(count)
    ]
    half = [part.bfloat16() for part in parts]
    assert torch.equal(sum_rounded(half), sum(part.double() for part in half).bfloat16())  # type: ignore[union-attr]
    acc, part = torch.full((3, 2), 256.75), torch.full((3, 2), 0.5).bfloat16()
    # Rounded first, 256.75 would be 256 in bf16, and the sum 256 too: it is 257.25, which is nearer to 258.
    for total in add_rounded((acc, acc), (part, part)):
        assert torch.equal(total, torch.full((3, 2), 258.0).bfloat16())
    assert (acc == 256.75).all()


def test_backends_are_chosen_by_device_and_refused_by_name() -> None:
    cpu = torch.device("cpu")
    assert select_backend("auto", cpu, torch.float32, False).name == "plain"
    with pytest.raises(ValueError, match="train.attention = cudnn: needs a GPU and bfloat16"):
        select_backend("cudnn", cpu, torch.bfloat16, False)
    with pytest.raises(ValueError, match="train.attention = cudnn: its backward is not deterministic"):
        select_backend("cudnn", torch.device("cuda"), torch.bfloat16, True)


def test_weight_gradients_stay_in_fp32_under_saved_tensor_hooks() -> None:
    """A hook may hand back another object than was saved, without `main_grad`: swapping to the host does."""
    weights = {"w": torch.nn.Parameter(torch.randn(5, 8).bfloat16()), "n": torch.nn.Parameter(torch.ones(8).bfloat16())}
    buffer = GradientBuffer(weights)
    x = torch.randn(3, 8).bfloat16().requires_grad_()

    def run() -> dict[str, Tensor]:
        buffer.zero()
        norm_linear(x, weights["n"], weights["w"], EPS, True).sum().backward()
        linear(rms_norm(x, weights["n"], EPS), weights["w"]).sum().backward()
        swiglu_linear(x, weights["w"][:, :4], False).sum().backward()
        return {name: gradient.clone() for name, gradient in buffer.views().items()}

    plain = run()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t):
        hooked = run()
    assert all(torch.equal(plain[name], hooked[name]) for name in plain)
    assert not torch.equal(hooked["w"], hooked["w"].bfloat16().float()), "the sum went through bf16"
