"""What steps over the budget teach, and that steps as planned are none the worse for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import swap_long
from slimpipe.swap import SimulatedStreams, SwapManager, SwapSettings
from slimpipe.swap.room import Room
from slimpipe.swap.saved import Saved
from tests.swap.programs import batch, mlp
from tests.swap.support import check_clean, make_manager


def test_what_is_learned() -> None:
    room = Room()
    room.learn(-50, 700, 10_000)
    assert room.ahead(known=True) == room.ahead(known=False) == 0
    room.learn(100, 300, 10_000)
    assert (room.ahead(known=True), room.ahead(known=False)) == (100, 800)
    room.learn(40, 900, 10_000)
    room.learn(-500, 0, 10_000)
    assert (room.ahead(known=True), room.ahead(known=False)) == (140, 1040)
    room.learn(1 << 40, 0, 10_000)
    assert room.ahead(known=True) == 2_500


class Forgetful(Room):
    def learn(self, excess: int, largest: int, budget: int) -> None:
        pass


def steps_over_budget(room: Room) -> int:
    """Of the last 100 of 200 steps of the mixture of experts."""
    streams = SimulatedStreams(order="random", seed=1, rate=1e9)
    settings = SwapSettings(min_bytes=512, arena_bytes=1 << 16)
    manager = SwapManager(swap_long.BUDGET, 1 << 20, settings=settings, streams=streams)
    manager.executor.room = room
    peaks: list[int] = []
    swap_long.train("experts", 200, manager.step, lambda i: peaks.append(streams.peak_memory(restart=True)))
    check_clean(manager)
    return sum(peak > swap_long.BUDGET for peak in peaks[-100:])


@pytest.mark.filterwarnings("ignore:swap")
def test_a_mixture_of_experts_keeps_the_budget_better_once_it_has_learned() -> None:
    assert 4 * steps_over_budget(Room()) < steps_over_budget(Forgetful())


STEPS, TAUGHT = 24, 16


def moves(manager: SwapManager, rows: Callable[[int], int], taught: Room | None) -> list[tuple[Any, ...]]:
    """Every copy of STEPS steps: step, operator, size, direction, and whether a plan asked for it. `taught` is what the
    manager has learned by step TAUGHT, None: what it has learned itself."""
    executor, found = manager.executor, []
    start, bring = executor._start_copy, executor._copy_in

    def start_copy(saved: Saved) -> bool:
        found.append((manager.counts.steps, executor._operator, saved.nbytes, "out", saved.planned))
        return start(saved)

    def copy_in(saved: Saved, target: Any) -> None:
        found.append((manager.counts.steps, executor._operator, saved.nbytes, "in", saved.planned))
        bring(saved, target)

    executor._start_copy, executor._copy_in = start_copy, copy_in  # type: ignore[method-assign]
    model = mlp()
    for i in range(STEPS):
        if i == TAUGHT and taught is not None:
            executor.room = taught
        with manager.step():
            model(batch(i, rows(i))).square().mean().backward()
    return found


@pytest.mark.parametrize("kinds", [1, 2])
def test_steps_as_planned_move_the_same_whatever_others_taught(kinds: int) -> None:
    def rows(i: int) -> int:
        return 16 if i % kinds == 0 else 12

    without, taught = make_manager(60_000), make_manager(60_000)
    expected = moves(without, rows, None)
    assert moves(taught, rows, Room(excess=15_000, largest=8_192)) == expected
    assert any(step >= TAUGHT and planned for step, *_, planned in expected) and len(without.stages.known) == kinds
    assert taught.policies == without.policies
    assert without.executor.room.excess == 0  # all keep the budget


def test_steps_that_differ_from_their_plan_leave_room() -> None:
    """One row more than when the plan was made: the same kind of step, and not to the letter."""

    def rows(i: int) -> int:
        return 64 if i < TAUGHT else 65

    plain = moves(make_manager(200_000), rows, None)
    early = moves(make_manager(200_000), rows, Room(excess=30_000))
    unplanned = [sum(step >= TAUGHT and not planned for step, *_, planned in run) for run in (plain, early)]
    assert unplanned[0] < unplanned[1]
