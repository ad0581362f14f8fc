"""The LSE merge, both implementations forced, against attention in float64 that never was cut."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slimpipe.kernels.merge import Implementation, extension_available, merge, merge_reference

ROOT = Path(__file__).resolve().parents[1]
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
# Largest relative error of one rounding.
ROUNDING = {torch.float32: 2.0**-24, torch.float64: 2.0**-53, torch.bfloat16: 2.0**-8}


@pytest.fixture(scope="session")
def _extension(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The operators as installed; where they are not but a compiler is there, built here, so that no test skips."""
    if extension_available():
        return
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None or shutil.which(compiler) is None:
        pytest.skip("no C++ compiler: csrc/ cannot be built")
    folder = tmp_path_factory.mktemp("csrc")
    build = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    library = folder / "slimpipe" / "_C.so"
    assert library.exists(), done.stdout + done.stderr
    torch.ops.load_library(str(library))
    extension_available.cache_clear()


@pytest.fixture(params=["cpp", "torch"])
def implementation(request: pytest.FixtureRequest) -> Implementation:
    if request.param == "cpp":
        request.getfixturevalue("_extension")
    return request.param  # type: ignore[no-any-return]


def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Plain attention: `[b, s, h, d]` -> out `[b, s, h, d]`, lse `[b, h, s]`."""
    scores = torch.einsum("bshd,bthd->bhst", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v), scores.logsumexp(-1)


def partials(
    count: int, dtype: torch.dtype, b: int = 2, s: int = 7, h: int = 3, d: int = 16, seed: int = 0
) -> tuple[list[Tensor], list[Tensor]]:
    """Random partials with LSEs that differ by several units, as those of a long past and a short one do."""
    generator = torch.Generator().manual_seed(seed)
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    outs = [torch.randn(b, s, h, d, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]
    lses = [3 * torch.randn(b, h, s, generator=generator, dtype=torch.float64).to(lse_dtype) for _ in range(count)]
    return outs, lses


def exact(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The merge in float64, by the definition."""
    lses_NBHs = torch.stack(lses).double()
    lse = lses_NBHs.logsumexp(0)
    weights = (lses_NBHs - lse).exp().transpose(2, 3).unsqueeze(-1)
    return (weights * torch.stack(outs).double()).sum(0), lse


def assert_rounded_once(out: Tensor, lse: Tensor, outs: list[Tensor], lses: list[Tensor]) -> None:
    """Within one rounding of the exact merge, plus a few roundings of the accumulation."""
    expected, expected_lse = exact(outs, lses)
    accumulation = 8 * ROUNDING[torch.float64 if out.dtype == torch.float64 else torch.float32]
    largest = torch.stack(outs).double().abs().amax(0)
    error = (out.double() - expected).abs()
    assert (error <= ROUNDING[out.dtype] * expected.abs() + accumulation * largest).all()
    assert torch.allclose(lse.double(), expected_lse, rtol=accumulation, atol=accumulation)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_uncut_attention(implementation: Implementation, dtype: torch.dtype, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    q, k, v = (torch.randn(2, t, 3, 16, generator=generator, dtype=torch.float64) for t in (5, 24, 24))
    expected, expected_lse = attention(q, k, v)
    pieces = [attention(q, k[:, r], v[:, r]) for r in (slice(i, None, count) for i in range(count))]
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32

    out, lse = merge([o.to(dtype) for o, _ in pieces], [x.to(lse_dtype) for _, x in pieces], implementation)

    assert out.dtype == dtype and lse.dtype == lse_dtype
    # The partials are rounded, then the merge: two roundings in all.
    tolerance = 4 * ROUNDING[dtype]
    assert (out.double() - expected).norm() <= tolerance * expected.norm()
    assert (lse.double() - expected_lse).abs().max() <= 8 * ROUNDING[lse_dtype] * expected_lse.abs().max()


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounds_once(implementation: Implementation, dtype: torch.dtype, count: int) -> None:
    outs, lses = partials(count, dtype)
    out, lse = merge(outs, lses, implementation)
    assert out.is_contiguous() and lse.is_contiguous()
    assert_rounded_once(out, lse, outs, lses)


def test_merging_all_at_once_beats_a_chain(implementation: Implementation) -> None:
    outs, lses = partials(4, torch.bfloat16, s=256, d=64)
    # Weights of equal size: the case where every rounding of the chain counts.
    lses = [0.1 * lse for lse in lses]
    expected, _ = exact(outs, lses)

    at_once, _ = merge(outs, lses, implementation)
    chained, lse = outs[0], lses[0]
    for next_out, next_lse in zip(outs[1:], lses[1:], strict=True):
        chained, lse = merge([chained, next_out], [lse, next_lse], implementation)

    error_at_once = (at_once.double() - expected).norm()
    error_chained = (chained.double() - expected).norm()
    assert error_at_once < 0.8 * error_chained


@pytest.mark.parametrize("dtype", DTYPES)
def test_single_partial_is_returned_as_it_is(implementation: Implementation, dtype: torch.dtype) -> None:
    outs, lses = partials(1, dtype)
    out, lse = merge(outs, lses, implementation)
    assert out is outs[0] and lse is lses[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_without_keys(implementation: Implementation, dtype: torch.dtype) -> None:
    outs, lses = partials(3, dtype)
    for lse in lses:
        lse[:, :, 0] = -torch.inf  # no keys anywhere
    lses[0][:, :, 1] = lses[2][:, :, 1] = -torch.inf  # keys in one partial only
    lses[1][:, :, 2] = -torch.inf
    # What stands in the out of such a query must not matter.
    outs[0][:, 0] = torch.nan
    outs[2][:, 1] = torch.inf
    outs[1][:, 2] = torch.nan

    out, lse = merge(outs, lses, implementation)

    assert (out[:, 0] == 0).all() and (lse[:, :, 0] == -torch.inf).all()
    assert torch.equal(out[:, 1], outs[1][:, 1]) and torch.equal(lse[:, :, 1], lses[1][:, :, 1])
    expected, expected_lse = merge([outs[0][:, 2:3], outs[2][:, 2:3]], [x[:, :, 2:3] for x in (lses[0], lses[2])])
    assert torch.allclose(out[:, 2:3], expected) and torch.allclose(lse[:, :, 2:3], expected_lse)
    assert out.isfinite().all() and not lse.isnan().any()


def test_nan_of_a_real_partial_shows(implementation: Implementation) -> None:
    outs, lses = partials(2, torch.float32)
    outs[0][0, 1, 2, 3] = torch.nan
    lses[1][1, 0, 4] = torch.nan
    out, lse = merge(outs, lses, implementation)
    assert out[0, 1, 2, 3].isnan() and out[1, 4, 0].isnan().all() and lse[1, 0, 4].isnan()
    assert out.isnan().sum() == 1 + out.shape[-1] and lse.isnan().sum() == 1


def test_extreme_lses(implementation: Implementation) -> None:
    outs, lses = partials(3, torch.float32)
    # A common shift leaves the weights alone, however coarse fp32 is at that size.
    shifted = [(lse * 1024).round() / 1024 + 4096 for lse in lses]
    assert_rounded_once(*merge(outs, shifted, implementation), outs, shifted)
    # Neither overflow nor a 0/0 where the LSEs are far apart.
    lses[0] += 1e30
    out, lse = merge(outs, lses, implementation)
    assert torch.equal(out, outs[0]) and torch.equal(lse, lses[0])


def strided(outs: list[Tensor], lses: list[Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """The same values behind other strides."""
    yield [x.transpose(1, 2).contiguous().transpose(1, 2) for x in outs], lses  # kernels with [b, h, s, d]
    s = outs[0].shape[1]
    # parts of a buffer
    yield [torch.cat([x, x], 1)[:, :s] for x in outs], [torch.cat([x, x], 2)[..., s:] for x in lses]
    yield outs, [x.transpose(1, 2).contiguous().transpose(1, 2) for x in lses]  # LSE as [b, s, h]
    yield [x.transpose(2, 3).contiguous().transpose(2, 3) for x in outs], lses  # d not innermost
    yield [torch.stack([x, x], -1)[..., 0] for x in outs], [torch.stack([x, x], -1)[..., 0] for x in lses]
    yield [outs[0], *(x.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3) for x in outs[1:])], lses


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_do_not_matter(implementation: Implementation, dtype: torch.dtype) -> None:
    outs, lses = partials(3, dtype)
    expected, expected_lse = merge(outs, lses, implementation)
    for i, (other_outs, other_lses) in enumerate(strided(outs, lses)):
        out, lse = merge(other_outs, other_lses, implementation)
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse), i
        assert out.is_contiguous() and lse.is_contiguous(), i


def test_expanded_partials(implementation: Implementation) -> None:
    outs, lses = partials(2, torch.float32, b=1)
    out, lse = merge([x.expand(3, -1, -1, -1) for x in outs], [x.expand(3, -1, -1) for x in lses], implementation)
    expected, expected_lse = merge(outs, lses, implementation)
    assert torch.equal(out, expected.expand(3, -1, -1, -1)) and torch.equal(lse, expected_lse.expand(3, -1, -1))


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 0, 2, 8), (0, 3, 2, 8), (2, 3, 1, 5)])
def test_small_shapes(implementation: Implementation, shape: tuple[int, int, int, int]) -> None:
    b, s, h, d = shape
    outs, lses = partials(2, torch.float32, b, s, h, d)
    assert_rounded_once(*merge(outs, lses, implementation), outs, lses)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_do_not_matter(implementation: Implementation, dtype: torch.dtype) -> None:
    # Some 20 times the work below which one thread does everything; prime sizes, so that no cut falls even.
    outs, lses = partials(3, dtype, b=1, s=509, h=7, d=61)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            results.append(merge(outs, lses, implementation))
    finally:
        torch.set_num_threads(before)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


@pytest.mark.usefixtures("_extension")
@pytest.mark.parametrize("dtype", DTYPES)
def test_implementations_agree(dtype: torch.dtype) -> None:
    outs, lses = partials(4, dtype, s=64, d=32)
    out, lse = merge(outs, lses, "cpp")
    other_out, other_lse = merge(outs, lses, "torch")
    # Sums in the same order: at most the last bits of exp differ, and with them now and then a rounding.
    tolerance = 4 * ROUNDING[torch.float64 if dtype == torch.float64 else torch.float32]
    assert torch.allclose(lse, other_lse, rtol=tolerance, atol=tolerance)
    assert torch.allclose(out.double(), other_out.double(), rtol=2 * ROUNDING[dtype], atol=4 * tolerance)
    assert (out != other_out).double().mean() < (1.0 if dtype != torch.bfloat16 else 0.01)
    auto_out, _ = merge(outs, lses)
    assert torch.equal(auto_out, out)


def test_implementations_are_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    outs, lses = partials(2, torch.float32)
    monkeypatch.setattr("slimpipe.kernels.merge.extension_available", lambda: False)
    with pytest.raises(RuntimeError, match="extension not built"):
        merge(outs, lses, "cpp")
    out, _ = merge(outs, lses)
    assert torch.equal(out, merge_reference(outs, lses)[0])


def test_a_library_that_does_not_load_is_said_and_passed_over(tmp_path: Path) -> None:
    """In a copy of the package with a broken _C.so, in a process of its own: what is loaded stays loaded."""
    shutil.copytree(ROOT / "slimpipe", tmp_path / "slimpipe", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (tmp_path / "slimpipe" / "_C.so").write_bytes(b"not a library")
    code = "from slimpipe.kernels.merge import extension_available as f; print(f(), f())"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False"]
    assert done.stderr.count("does not load with torch") == 1


def test_misfits_are_refused() -> None:
    outs, lses = partials(2, torch.float32)
    with pytest.raises(ValueError, match="0 outs and 0 lses"):
        merge([], [])
    with pytest.raises(ValueError, match="2 outs and 1 lses"):
        merge(outs, lses[:1])
    with pytest.raises(ValueError, match=r"out 1 is torch.float32 \[2, 6, 3, 16\]"):
        merge([outs[0], outs[1][:, 1:]], lses)
    with pytest.raises(ValueError, match=r"lse 0 is torch.float32 \[2, 7, 3\].*expected torch.float32 \[2, 3, 7\]"):
        merge(outs, [lse.transpose(1, 2) for lse in lses])
    with pytest.raises(ValueError, match="lse 0 is torch.float64"):
        merge(outs, [lse.double() for lse in lses])
    with pytest.raises(ValueError, match="supported are float32, float64 and bfloat16"):
        merge([out.half() for out in outs], lses)
    with pytest.raises(ValueError, match=r"must be \[b, s, h, d\]"):
        merge([out[0] for out in outs], lses)
    with pytest.raises(RuntimeError, match="requires a gradient"):
        merge([outs[0].requires_grad_(), outs[1]], lses)
    with torch.no_grad():
        merge(outs, lses)
