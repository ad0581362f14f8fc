"""With and without swap: the same bits, for every program, on simulated streams that punish a missing wait."""

from __future__ import annotations

import pytest

from slimpipe.swap import SimulatedStreams, Stage
from tests.swap.programs import PROGRAMS
from tests.swap.support import check_bitwise, make_manager

TIGHT = 60_000
"""Bytes: less than any of the programs saves, more than the largest tensor."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_tight_budget(name: str) -> None:
    check_bitwise(PROGRAMS[name], make_manager(TIGHT, SimulatedStreams(order="late", rate=1e9)))


@pytest.mark.parametrize("name", PROGRAMS)
def test_everything_moves(name: str) -> None:
    """No budget at all, little host memory: slots are used again at once."""
    manager = make_manager(0, SimulatedStreams(order="random", seed=2, rate=1e8), host_budget=1 << 18)
    check_bitwise(PROGRAMS[name], manager)
    assert manager.counts.moved_out > 0 and manager.counts.moved_in > 0


@pytest.mark.parametrize("name", list(PROGRAMS)[::4])
def test_room_for_everything(name: str) -> None:
    """Nothing moves."""
    manager = check_bitwise(PROGRAMS[name], make_manager(None))
    assert manager.counts.moved_out == 0


@pytest.mark.parametrize("observer", ["hooks", "dispatch"])
@pytest.mark.parametrize(
    "name", ["plain", "views_and_transposes", "checkpointing", "retained_graph", "exceptions", "experts"]
)
def test_other_observers(name: str, observer: str) -> None:
    manager = make_manager(TIGHT, SimulatedStreams(order="random", seed=3, rate=1e9), observer=observer)
    check_bitwise(PROGRAMS[name], manager)


@pytest.mark.parametrize(
    "name", ["plain", "views_and_transposes", "transformer", "checkpointing", "gradient_accumulation"]
)
def test_it_comes_to_a_plan_and_follows_it(name: str) -> None:
    manager = make_manager(TIGHT // 2, SimulatedStreams(rate=1e9))
    check_bitwise(PROGRAMS[name], manager)
    assert manager.stage is Stage.STABLE
    assert manager.counts.planned_out > 0


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_share_of_the_bytes(share: float) -> None:
    manager = make_manager(None, SimulatedStreams(order="random", rate=1e9), move_share=share)
    check_bitwise(PROGRAMS["views_and_transposes"], manager)
    assert manager.counts.planned_out > 0 and manager.counts.fallbacks == 0
