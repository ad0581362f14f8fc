"""GPU attention backends with a merged LSE, against an fp32 reference; expected errors are in docs/h200.md."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from slimpipe.kernels.attention import AttentionBackend, PlainAttention, candidates, pieces, select_backend
from slimpipe.kernels.attention.fastest import AttentionShape, fastest, time_on_device
from slimpipe.kernels.attention.flash_package import PACKAGES, is_installed
from slimpipe.runtime.kv_slots import LayerSlots, SlicePlace
from slimpipe.runtime.sliced_attention import sliced_attention

pytestmark = pytest.mark.gpu
HEADS, KV_HEADS, WIDTH, TOKENS, SLICES = 8, 2, 128, 3072, 6


def inputs(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, TOKENS, heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16).to(dtype) for shape in shapes]


def whole(backend: AttentionBackend, dtype: torch.dtype) -> list[Tensor]:
    """out, dq, dk, dv of the whole sequence in one block."""
    q, k, v, dout = inputs(dtype)
    out, lse = backend.forward(q, k, v, causal=True)
    return [out, *backend.backward(dout, q, k, v, out, lse, causal=True)]


def sliced(backend: AttentionBackend, slots_order: list[int]) -> list[Tensor]:
    """The same, slice by slice; `slots_order[i]` is slice i's slot, so that its past may be several ranges."""
    q, k, v, dout = (x.requires_grad_() for x in inputs(torch.bfloat16))
    slots = LayerSlots(SLICES, TOKENS // SLICES, accumulate=True)
    outs = []
    for index, slot in enumerate(slots_order):
        cut = slice(index * TOKENS // SLICES, (index + 1) * TOKENS // SLICES)
        past: list[tuple[int, int]] = []
        for earlier in sorted(slots_order[:index]):
            joins = past and past[-1][1] == earlier
            past = [*past[:-1], (past[-1][0], earlier + 1)] if joins else [*past, (earlier, earlier + 1)]
        place = SlicePlace(slot, tuple(past), last=index == SLICES - 1)
        outs.append(sliced_attention(q[:, cut], k[:, cut], v[:, cut], slots, place, backend))
    for index in reversed(range(SLICES)):
        cut = slice(index * TOKENS // SLICES, (index + 1) * TOKENS // SLICES)
        outs[index].backward(dout[:, cut], retain_graph=True)
    return [torch.cat(outs, 1).detach(), q.grad, k.grad, v.grad]  # type: ignore[list-item]


def errors(found: list[Tensor]) -> list[float]:
    reference = whole(PlainAttention(), torch.float64)
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, reference, strict=True)]


BACKENDS = ["cudnn", "flash", *PACKAGES]


def backend_called(name: str) -> AttentionBackend:
    """Skips where the package is not installed; one that is there and does not fit fails the test."""
    if name in PACKAGES and not is_installed(name):
        pytest.skip(f"{PACKAGES[name].distribution} is not installed")
    return select_backend(name, torch.device("cuda"), torch.bfloat16, False)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 5, 0, 4, 1, 3]], ids=str)
def test_sliced_attention_is_as_exact_as_one_kernel(name: str, order: list[int]) -> None:
    """In the first order a backend that can takes each slice and its past in one call, in the second in two."""
    backend = backend_called(name)
    plain, cut = errors(whole(backend, torch.bfloat16)), errors(sliced(backend, order))
    print(f"\n{backend.name} {order}: plain {[f'{e:.2e}' for e in plain]} sliced {[f'{e:.2e}' for e in cut]}")
    # Sliced, each result is rounded once more than in one kernel: parts come out in bf16, and so does their sum. A
    # rounding to bf16 is 1.66e-3 of a tensor's norm: sqrt(2.98^2 + 1.66^2) = 3.41e-3 for dK, measured 3.39e-3.
    one_rounding = 1.66e-3
    for a, b in zip(cut, plain, strict=True):
        assert a <= 1.03 * (b * b + one_rounding * one_rounding) ** 0.5


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backward_in_pieces_is_as_exact(name: str) -> None:
    """No more than 512 keys a call, of pasts up to 2560."""
    backend = backend_called(name)
    few = 512 * pieces.bytes_per_key(name, HEADS, KV_HEADS, WIDTH, 2)
    plain = errors(whole(backend, torch.bfloat16))
    with mock.patch.object(pieces, "STEP", 512), mock.patch.object(pieces, "MOST_BYTES", few):
        cut = errors(sliced(backend, list(range(SLICES))))
    print(f"\n{backend.name}: plain {[f'{e:.2e}' for e in plain]} in pieces {[f'{e:.2e}' for e in cut]}")
    one_rounding = 1.66e-3
    for a, b in zip(cut, plain, strict=True):
        assert a <= 1.03 * (b * b + one_rounding * one_rounding) ** 0.5


@pytest.mark.parametrize("name", list(PACKAGES))
def test_a_past_and_a_slice_in_one_block(name: str) -> None:
    """The last slice's query against all keys, mask at the bottom right: its part of one kernel's whole result."""
    backend = backend_called(name)
    assert backend.bottom_right
    q, k, v, dout = inputs(torch.bfloat16)
    last = slice(TOKENS - TOKENS // SLICES, TOKENS)
    out, lse = backend.forward(q[:, last], k, v, causal=True)
    dq, _, _ = backend.backward(dout[:, last], q[:, last], k, v, out, lse, causal=True)
    for ours, expected in zip((out, dq), whole(PlainAttention(), torch.float64)[:2], strict=True):
        error = float((ours.double() - expected[:, last]).norm() / expected[:, last].norm())
        print(f"\n{name}, one block: {error:.2e}")
        assert error <= 3.5e-3


def test_the_fastest_backend_is_measured_once(tmp_path: Path) -> None:
    shape = AttentionShape(1, 2048, 16384, 32, 8, 128, "bfloat16")
    found = candidates(torch.device("cuda"), torch.bfloat16)
    first, again = (fastest(shape, found, {"torch": torch.__version__}, tmp_path, time_on_device) for _ in range(2))
    print(f"\n{first}")
    assert first.name == again.name and first.name in found
    assert not first.cached and again.cached
    assert all(time is not None and time > 0 for time in first.milliseconds.values())
