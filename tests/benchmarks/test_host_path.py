"""What the host does for one layer and slice, counted: more of it, and short slices leave a GPU waiting."""

from __future__ import annotations

import pytest

from benchmarks.host_path import calls_per_layer

pytest.importorskip("triton")


@pytest.mark.parametrize(
    ("recompute", "forward", "backward"),
    [
        # aten's dispatches, compiled functions, Triton kernels, cuDNN's attention, nodes of autograd's graph
        ("none", (47, 0, 5, 2, 8), (60, 0, 8, 2, 0)),
        ("norms", (47, 0, 5, 2, 8), (63, 0, 11, 2, 0)),
    ],
)
def test_a_layer_and_slice_takes_so_many_calls(
    recompute: str, forward: tuple[int, ...], backward: tuple[int, ...]
) -> None:
    """Where one needs fewer, state the fewer; a call more is 15 us of a slow host, a Triton kernel or a compiled
    function more."""
    found = calls_per_layer(recompute)
    for name, expected in (("forward", forward), ("backward", backward)):
        calls = found[name].row()
        numbers = tuple(calls[kind] for kind in ("aten", "compiled", "triton", "cudnn", "nodes"))
        assert numbers == expected, f"{name}: {found[name]}"
