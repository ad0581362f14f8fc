"""The Triton kernels: what they compute, in the interpreter; and that nothing of them is compiled in mid-step."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor

from slimpipe.kernels import fuse, merge, norm, rope, sums, swiglu
from tests.support.triton_variants import Variant, launches_noted

triton = pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]


def version(module: object) -> tuple[int, ...]:
    return tuple(int(part) for part in module.__version__.split(".")[:2])  # type: ignore[attr-defined]


def test_they_compute_what_the_plain_forms_do() -> None:
    if version(triton) < (3, 9) and version(numpy) >= (2, 4):
        pytest.skip(f"Triton {triton.__version__}'s interpreter has no loops with numpy {numpy.__version__}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/interpreted_triton.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


# ---- one code for all lengths and places ----


@pytest.fixture
def met() -> Iterator[set[Variant]]:
    found: set[Variant] = set()
    with launches_noted(found.add):
        yield found


# Of tokens: 1 and multiples of 16 are what Triton takes for granted where it may.
LENGTHS = [1, 2, 3, 16, 17, 48, 250, 4096]


@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("kind", ["first", "add", "rounded"])
@pytest.mark.parametrize("width", [8, 128])
def test_sums_of_all_pasts_are_one_code(width: int, kind: str, b: int, met: set[Variant]) -> None:
    form = sums.add_pairs.triton
    assert form is not None
    for total in (4100, 8192):
        dk, dv = (torch.empty(b, total, 1, width) for _ in range(2))
        for length in LENGTHS:
            for start in (0, 1, 3, total - length):
                accs = dk[:, start : start + length], dv[:, start : start + length]
                own, of_more = (torch.empty(b, length + more, 1, width, dtype=torch.bfloat16) for more in (0, 5))
                for part in (own, of_more[:, :length]):
                    outs = (own, torch.empty_like(own)) if kind == "rounded" else accs
                    arguments = ((part, part), None if kind == "first" else accs, outs)
                    assert form.fits(*arguments)
                    form.run(*arguments)
    assert len(met) == 1


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_merges_of_so_many_parts_are_one_code(parts: int, met: set[Variant]) -> None:
    form = merge._merge_into.triton
    assert form is not None
    for b, tokens, heads in [(1, 1, 1), (1, 16, 4), (2, 17, 3), (1, 4096, 1), (1, 250, 16), (1, 8, 2), (1, 16, 16)]:
        layouts = [
            torch.empty(b, tokens, heads, 16),
            torch.empty(b, heads, tokens, 16).transpose(1, 2),
            torch.empty(b, tokens + 1, heads, 24)[:, 1:, :, 8:],
        ]
        lses = [torch.empty(b, heads, tokens) for _ in range(parts)]
        for outs in (layouts[:1] * parts, layouts[1:2] * parts, (layouts * 2)[:parts]):
            assert form.fits(outs, lses, torch.empty(b, tokens, heads, 16))
            form.run(outs, lses, torch.empty(b, tokens, heads, 16))
    assert len(met) == 1


@pytest.mark.parametrize("beside", [False, True])
def test_norms_of_all_lengths_are_one_code(beside: bool, met: set[Variant]) -> None:
    for tokens in LENGTHS:
        x = torch.empty(1, tokens, 64, dtype=torch.bfloat16)
        form, arguments = norm.rms_norm_backward.triton, (x, x, torch.empty(1, tokens, 1), x[0, 0])
        assert form is not None
        for more in ((x,),) if beside else ((), (None,)):
            assert form.fits(*arguments, *more)
            form.run(*arguments, *more)
    assert len(met) == len({variant.kernel for variant in met}) == 2


def test_norms_of_sums_of_all_lengths_are_one_code(met: set[Variant]) -> None:
    for tokens in LENGTHS:
        x = torch.empty(1, tokens, 64, dtype=torch.bfloat16)
        form, arguments = norm.add_rms_norm_forward.triton, (x, x, x[0, 0], 1e-5)
        assert form is not None and form.fits(*arguments)
        form.run(*arguments)
    assert len(met) == 1


def test_norms_alone_of_all_lengths_are_one_code(met: set[Variant]) -> None:
    for tokens in LENGTHS:
        x, rstd = torch.empty(1, tokens, 64, dtype=torch.bfloat16), torch.empty(1, tokens, 1)
        for function, arguments in (
            (norm.rms_norm_forward, (x, x[0, 0], 1e-5)),
            (norm.rms_norm_again, (x, rstd, x[0, 0])),
        ):
            assert function.triton is not None and function.triton.fits(*arguments)
            function.triton.run(*arguments)
    assert len(met) == 2


def test_any_eps_is_one_code(met: set[Variant]) -> None:
    """What is kept of a launch (`slimpipe.kernels.triton.launch`) is not told by numbers."""
    x = torch.empty(1, 5, 64)
    for eps in (1e-5, 1, 0, 16):
        for function, arguments in (
            (norm.rms_norm_forward, (x, x[0, 0], eps)),
            (norm.add_rms_norm_forward, (x, x, x[0, 0], eps)),
        ):
            assert function.triton is not None and function.triton.fits(*arguments)
            function.triton.run(*arguments)
    assert len(met) == 2


def test_swiglus_of_all_lengths_are_one_code(met: set[Variant]) -> None:
    for tokens in LENGTHS:
        gate_up, g = (torch.empty(1, tokens, width, dtype=torch.bfloat16) for width in (96, 48))
        for function, arguments in ((swiglu.swiglu_forward, (gate_up,)), (swiglu.swiglu_backward, (g, gate_up))):
            assert function.triton is not None and function.triton.fits(*arguments)
            function.triton.run(*arguments)
    assert len(met) == 2


def test_ropes_of_all_lengths_and_layouts_are_one_code(met: set[Variant]) -> None:
    for b, tokens in [(1, 1), (1, 16), (2, 17), (1, 250), (2, 4096)]:
        cos = torch.empty(tokens, 1, 8)
        qkv, dq, dk = (torch.empty(b, tokens, heads, 16, dtype=torch.bfloat16) for heads in (8, 4, 2))
        by_heads = torch.empty(b, 4, tokens, 16, dtype=torch.bfloat16).transpose(1, 2)
        for function, arguments in (
            (rope.rotate_heads, (qkv, cos, cos, (4, 2, 2))),
            (rope.rotate_heads_back, (dq, dk, dk, cos, cos)),
            (rope.rotate_heads_back, (by_heads, dk, dk, cos, cos)),
        ):
            assert function.triton is not None and function.triton.fits(*arguments)
            function.triton.run(*arguments)
    assert len(met) == 2


# ---- which form runs ----


def test_a_gpu_runs_the_first_form_that_takes_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here without one: forms say their names."""

    class Module:
        def fits(self, x: Tensor) -> bool:
            return x.dtype != torch.float64

        def run(self, x: Tensor) -> str:
            return "triton"

    def function(x: Tensor) -> str:
        return "plain"

    monkeypatch.setattr(torch, "compile", lambda plain, dynamic: lambda x: "compiled")
    monkeypatch.setattr(fuse, "runs_compiled", lambda argument: True)
    monkeypatch.setattr(fuse, "runs_triton", lambda argument: True)
    single, double = torch.zeros(1), torch.zeros(1, dtype=torch.float64)

    def said(*forms: fuse.Form) -> tuple[str, str]:
        monkeypatch.setattr(fuse, "ON_GPUS", {"function": forms} if forms else {})
        found = fuse.Fused(function, "slimpipe.kernels.triton.none")
        found.__dict__["triton"] = Module()
        return found(single), found(double)

    assert said("triton", "compiled") == ("triton", "compiled")
    assert said("triton", "plain") == ("triton", "plain")
    assert said("compiled") == said() == ("compiled", "compiled")
    monkeypatch.setattr(fuse, "runs_triton", lambda argument: False)
    assert said("triton", "compiled") == ("compiled", "compiled")
    monkeypatch.setattr(fuse, "runs_compiled", lambda argument: False)
    assert said("triton", "compiled") == ("plain", "plain")


def test_every_name_of_the_table_is_a_function_with_its_forms() -> None:
    modules = (merge, norm, rope, sums, swiglu)
    found = [value for module in modules for value in vars(module).values() if isinstance(value, fuse.Fused)]
    functions = {function.plain.__name__: function for function in found if function.plain.__name__ in fuse.ON_GPUS}
    assert set(fuse.ON_GPUS) == set(functions)
    for name, function in functions.items():
        form = function.triton
        assert form is not None and callable(form.fits) and callable(form.run), name
