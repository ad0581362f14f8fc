"""The judge is judged: by a token-at-a-time float64 model in scalars and NumPy vectors, and by finite differences."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.reference import (
    IGNORED,
    LlamaSpec,
    RopeScaling,
    random_weights,
    reference_loss_and_grads,
    relative_error,
    rope_tables,
)

Vector = Any  # a NumPy float64 vector or matrix; NumPy's own types tell a reader nothing more here

SPECS = {
    "gqa": LlamaSpec(2, 12, heads=4, kv_heads=2, head_dim=6, intermediate=10, vocab=17),
    "mha_tied": LlamaSpec(2, 12, heads=2, kv_heads=2, head_dim=4, intermediate=10, vocab=17, tied=True),
    "qk_norm_linear": LlamaSpec(
        2, 12, 4, 1, 4, 10, 17, qk_norm=True, norm_eps=1e-2, rope_theta=50.0, rope_scaling=RopeScaling("linear", 2.5)
    ),
    "llama3": LlamaSpec(
        2, 12, 4, 2, 8, 10, 17, rope_theta=100.0, rope_scaling=RopeScaling("llama3", 8.0, original_length=64)
    ),
}


def batch(spec: LlamaSpec, B: int = 2, S: int = 9) -> tuple[Tensor, Tensor]:
    """Tokens and already shifted labels [B,S], some of them ignored."""
    generator = torch.Generator().manual_seed(7)
    text = torch.randint(spec.vocab, (B, S + 1), generator=generator)
    tokens, labels = text[:, :-1], text[:, 1:].clone()
    labels[0, 2:5] = IGNORED
    return tokens, labels


def plain_loss(spec: LlamaSpec, weights: Mapping[str, Tensor], tokens: Tensor, labels: Tensor) -> float:
    """The model one token at a time, as its definition reads: no batched operation, no PyTorch."""
    w = {name: weight.double().numpy() for name, weight in weights.items()}
    head = w["embedding.weight"] if spec.tied else w["head.weight"]
    total, count = 0.0, 0
    for sequence, targets in zip(tokens.tolist(), labels.tolist(), strict=True):
        cache: list[list[list[tuple[Vector, Vector]]]]
        cache = [[[] for _ in range(spec.kv_heads)] for _ in range(spec.layers)]
        for position, (token, target) in enumerate(zip(sequence, targets, strict=True)):
            x = w["embedding.weight"][token]
            for i in range(spec.layers):
                x = plain_layer(spec, w, f"layers.{i}.", x, position, cache[i])
            if target != IGNORED:
                logits = head @ plain_norm(x, w["head.norm.weight"], spec)
                total += math.log(sum(math.exp(z) for z in logits)) - logits[target]
                count += 1
    return total / count


def plain_layer(
    spec: LlamaSpec,
    w: Mapping[str, Vector],
    at: str,
    x: Vector,
    position: int,
    cache: list[list[tuple[Vector, Vector]]],
) -> Vector:
    d, h, g = spec.head_dim, spec.heads, spec.kv_heads
    rows = (w[at + "attention.qkv.weight"] @ plain_norm(x, w[at + "attention_norm.weight"], spec)).reshape(-1, d)
    queries, keys = list(rows[:h]), list(rows[h : h + g])
    if spec.qk_norm:
        queries = [plain_norm(q, w[at + "attention.q_norm.weight"], spec) for q in queries]
        keys = [plain_norm(k, w[at + "attention.k_norm.weight"], spec) for k in keys]
    for j in range(g):
        cache[j].append((plain_rope(spec, keys[j], position), rows[h + g + j]))
    outputs = []
    for j in range(h):
        past = cache[j // (h // g)]
        query = plain_rope(spec, queries[j], position)
        scores = [math.exp(float(query @ k) / math.sqrt(d)) for k, _ in past]
        outputs.append(sum(s * v for s, (_, v) in zip(scores, past, strict=True)) / sum(scores))
    x = x + w[at + "attention.output.weight"] @ np.concatenate(outputs)
    gate_up = w[at + "mlp.gate_up.weight"] @ plain_norm(x, w[at + "mlp_norm.weight"], spec)
    gate, up = gate_up[: spec.intermediate], gate_up[spec.intermediate :]
    return x + w[at + "mlp.down.weight"] @ (gate / (1 + np.exp(-gate)) * up)


def plain_norm(x: Vector, weight: Vector, spec: LlamaSpec) -> Vector:
    return x / math.sqrt(sum(float(e) ** 2 for e in x) / len(x) + spec.norm_eps) * weight


def plain_rope(spec: LlamaSpec, x: Vector, position: int) -> Vector:
    """Multiplies the pair (x_i, x_{i + d/2}), read as a complex number, by e^(i position frequency)."""
    half = spec.head_dim // 2
    out = np.empty_like(x)
    for i in range(half):
        turned = complex(x[i], x[i + half]) * np.exp(1j * position * plain_frequency(spec, i))
        out[i], out[i + half] = turned.real, turned.imag
    return out


def plain_frequency(spec: LlamaSpec, i: int) -> float:
    frequency: float = spec.rope_theta ** (-2 * i / spec.head_dim)
    scaling = spec.rope_scaling
    if scaling is None:
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    # As Meta's llama-models has it, in wavelengths.
    wavelength = 2 * math.pi / frequency
    if wavelength < scaling.original_length / scaling.high_freq_factor:
        return frequency
    if wavelength > scaling.original_length / scaling.low_freq_factor:
        return frequency / scaling.factor
    smooth = scaling.original_length / wavelength - scaling.low_freq_factor
    smooth /= scaling.high_freq_factor - scaling.low_freq_factor
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


@pytest.mark.parametrize("name", SPECS)
def test_loss_equals_the_token_at_a_time_model(name: str) -> None:
    spec = SPECS[name]
    weights, (tokens, labels) = random_weights(spec, dtype=torch.float64), batch(spec)
    loss, _ = reference_loss_and_grads(spec, weights, tokens, labels, torch.float64)
    assert loss.dtype == torch.float64
    assert float(loss) == pytest.approx(plain_loss(spec, weights, tokens, labels), rel=1e-12)


@pytest.mark.parametrize("name", SPECS)
def test_every_gradient_equals_finite_differences_of_the_token_at_a_time_model(name: str) -> None:
    """Along the gradient (so its length is tested) and along a random direction (so its bearing is)."""
    spec = SPECS[name]
    weights, (tokens, labels) = random_weights(spec, dtype=torch.float64), batch(spec, S=5)
    _, grads = reference_loss_and_grads(spec, weights, tokens, labels, torch.float64)
    assert grads.keys() == spec.shapes().keys()
    generator = torch.Generator().manual_seed(3)
    for weight_name, grad in grads.items():
        assert grad.norm() > 1e-5, weight_name
        for direction in (grad, torch.randn(grad.shape, generator=generator, dtype=torch.float64)):
            step = 1e-5 * direction / direction.norm()
            ahead, behind = (
                plain_loss(spec, {**weights, weight_name: weights[weight_name] + sign * step}, tokens, labels)
                for sign in (1, -1)
            )
            slope = float((grad * direction).sum() / direction.norm())
            assert (ahead - behind) / 2e-5 == pytest.approx(slope, rel=1e-5, abs=1e-8), weight_name


def test_float32_is_near_float64() -> None:
    spec = SPECS["gqa"]
    weights, (tokens, labels) = random_weights(spec), batch(spec)
    loss, grads = reference_loss_and_grads(spec, weights, tokens, labels)
    exact_loss, exact = reference_loss_and_grads(spec, weights, tokens, labels, torch.float64)
    assert float(loss) == pytest.approx(float(exact_loss), rel=1e-6)
    assert all(grad.dtype == torch.float32 for grad in grads.values())
    assert max(relative_error(grads[name], exact[name]) for name in exact) < 2e-6


def test_llama3_scaling_has_all_three_bands() -> None:
    spec = SPECS["llama3"]
    plain = LlamaSpec(**{**vars(spec), "rope_scaling": None})
    ratios = [plain_frequency(spec, i) / plain_frequency(plain, i) for i in range(spec.head_dim // 2)]
    assert ratios[0] == 1 and ratios[-1] == 1 / 8 and any(1 / 8 < ratio < 1 for ratio in ratios)
    cos, _ = rope_tables(spec, 2, torch.float64)
    assert cos[1].tolist() == pytest.approx([math.cos(plain_frequency(spec, i)) for i in range(4)], rel=1e-12)


def test_a_masked_token_counts_in_neither_sum_nor_number() -> None:
    spec = SPECS["gqa"]
    weights, (tokens, labels) = random_weights(spec, dtype=torch.float64), batch(spec)
    rows = [reference_loss_and_grads(spec, weights, tokens[[b]], labels[[b]], torch.float64) for b in (0, 1)]
    valid = [int((labels[b] != IGNORED).sum()) for b in (0, 1)]
    loss, grads = reference_loss_and_grads(spec, weights, tokens, labels, torch.float64)
    share = [count / sum(valid) for count in valid]
    assert float(loss) == pytest.approx(share[0] * float(rows[0][0]) + share[1] * float(rows[1][0]), rel=1e-12)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, share[0] * rows[0][1][name] + share[1] * rows[1][1][name])


def test_weights_that_do_not_fit_are_refused_by_name() -> None:
    spec = SPECS["gqa"]
    weights = random_weights(spec)
    del weights["head.weight"]
    with pytest.raises(ValueError, match=r"head\.weight"):
        reference_loss_and_grads(spec, weights, *batch(spec))
    with pytest.raises(ValueError, match="no valid token"):
        reference_loss_and_grads(spec, random_weights(spec), batch(spec)[0], torch.full((2, 9), IGNORED))


def test_relative_error() -> None:
    assert relative_error(torch.tensor([3.0, 4.4]), torch.tensor([3.0, 4.0])) == pytest.approx(0.08)
    assert relative_error(torch.tensor([0.0]), torch.tensor([0.0])) == 0
    assert relative_error(torch.tensor([2.0]), torch.tensor([0.0])) == 2
