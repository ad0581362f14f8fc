"""Which layers each stage holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimpipe.schedule import PlanError, place_layers


@given(st.integers(1, 40), st.integers(0, 200))
def test_spread_evenly(stages: int, more: int) -> None:
    layers = stages + more
    placed = place_layers(layers, stages)
    assert [layer for stage in placed for layer in stage] == list(range(layers))
    counts = [len(stage) for stage in placed]
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == layers // stages  # the last stage takes none of the remainder


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_explicit(counts: list[int]) -> None:
    placed = place_layers(sum(counts), len(counts), counts)
    assert [len(stage) for stage in placed] == counts
    assert [layer for stage in placed for layer in stage] == list(range(sum(counts)))


@pytest.mark.parametrize(
    ("layers", "stages", "explicit", "message"),
    [
        (3, 4, None, "model.layers = 3: fewer than the 4 stages"),
        (3, 4, [1, 1, 1, 0], "model.layers = 3"),
        (8, 4, [2, 2, 4], "pipeline.layers_per_stage = [2, 2, 4]: 3 entries for 4 stages"),
        (8, 4, [4, 2, 2, 0], "pipeline.layers_per_stage = [4, 2, 2, 0]: stage 3 has 0 layers"),
        (8, 4, [4, 2, 3, -1], "stage 3 has -1 layers"),
        (8, 4, [2, 2, 2, 3], "pipeline.layers_per_stage = [2, 2, 2, 3]: adds up to 9, but model.layers = 8"),
    ],
)
def test_refusals(layers: int, stages: int, explicit: list[int] | None, message: str) -> None:
    with pytest.raises(PlanError) as error:
        place_layers(layers, stages, explicit)
    assert message in str(error.value)
