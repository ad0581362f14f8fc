"""Shapes to test over: hypothesis strategies and grids of what each schedule supports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hypothesis import strategies as st

from slimpipe.schedule import BUILT, Shape, supported

Case = tuple[str, Shape]


def cases(
    p: Iterable[int], v: Iterable[int], n: Iterable[int], m: Iterable[int], names: Iterable[str] = BUILT
) -> Iterator[Case]:
    """Every (schedule, shape) of the product that is supported."""
    for name in names:
        for ranks in p:
            for chunks in v:
                for slices in n:
                    for microbatches in m:
                        shape = Shape(ranks, chunks, slices, microbatches)
                        if supported(name, shape) is None:
                            yield name, shape


@st.composite
def slimpipe_shapes(draw: st.DrawFn, p: int = 8, v: int = 3, n: int = 16, m: int = 8) -> Shape:
    """Supported slimpipe shapes up to and including these bounds."""
    ranks = draw(st.integers(1, p))
    chunks = draw(st.integers(1, v))
    slices = draw(st.integers(1 if chunks == 1 else ranks, n))
    return Shape(ranks, chunks, slices, draw(st.integers(1, m)))


@st.composite
def interleaved_shapes(draw: st.DrawFn) -> Shape:
    ranks = draw(st.integers(1, 8))
    return Shape(ranks, draw(st.integers(1, 4)), 1, ranks * draw(st.integers(1, 4)))


@st.composite
def supported_cases(draw: st.DrawFn) -> Case:
    """Any schedule with a shape that it supports."""
    name = draw(st.sampled_from(BUILT))
    if name == "slimpipe":
        return name, draw(slimpipe_shapes())
    if name == "interleaved":
        return name, draw(interleaved_shapes())
    return name, Shape(draw(st.integers(1, 8)), 1, 1, draw(st.integers(1, 12)))
