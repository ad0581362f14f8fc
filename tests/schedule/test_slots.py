"""Lockstep slots: every rank's list in their order, every input from an earlier slot."""

from __future__ import annotations

import pytest
from hypothesis import given

from slimpipe.schedule import Action, Op, PlanError, Shape, Slot, Unit, build, slots_of
from tests.schedule.shapes import slimpipe_shapes


def test_by_hand() -> None:
    """p = n = m = 2. Rank 1's first backward falls into the tick of its second forward, rank 0's into the next."""
    slots = slots_of(build("slimpipe", Shape(p=2, n=2, m=2)))
    table = {str(slot): [str(slots.unit(slot, rank) or "") for rank in range(2)] for slot in slots}
    assert table == {
        "F slot of tick 0": ["0.0@0", ""],
        "F slot of tick 1": ["0.1@0", "0.0@0"],
        "F slot of tick 2": ["1.0@0", "0.1@0"],
        "B slot of tick 2": ["", "0.1@0"],
        "F slot of tick 3": ["1.1@0", "1.0@0"],
        "B slot of tick 3": ["0.1@0", "0.0@0"],
        "F slot of tick 4": ["", "1.1@0"],
        "B slot of tick 4": ["0.0@0", "1.1@0"],
        "B slot of tick 5": ["1.1@0", "1.0@0"],
        "B slot of tick 6": ["1.0@0", ""],
    }
    assert slots.unit(Slot(0, "B"), 1) is None
    assert list(slots.pasts("F")) == [
        (Slot(0, "F"), (0, None)),
        (Slot(1, "F"), (1, 0)),
        (Slot(2, "F"), (0, 1)),
        (Slot(3, "F"), (1, 0)),
        (Slot(4, "F"), (None, 1)),
    ]


@given(slimpipe_shapes())
def test_order_of_every_list_and_of_every_dependency(shape: Shape) -> None:
    plan = build("slimpipe", shape)
    slots = slots_of(plan)
    seen = set()
    for rank, actions in enumerate(plan.ranks):
        order = [slots.slot_of(rank, action).order for action in actions]
        assert order == sorted(set(order))
        for action in actions:
            slot = slots.slot_of(rank, action)
            assert slots.unit(slot, rank) == action.unit
            seen.add(slot)
            made = plan.producer(rank, action)
            if made is not None:
                assert slots.slot_of(made[0], Action(action.op, made[1])).order < slot.order
            if action.op is Op.BACKWARD:
                assert slots.slot_of(rank, Action(Op.FORWARD, action.unit)).order < slot.order
    assert sorted(seen, key=lambda slot: slot.order) == list(slots)
    for kind in ("F", "B"):
        for slot, pasts in slots.pasts(kind, per_slice=3):
            units = [slots.unit(slot, rank) for rank in range(shape.p)]
            assert pasts == tuple(None if unit is None else 3 * unit.slice for unit in units)


def test_helpers_lie_in_their_owners_slot() -> None:
    slots = slots_of(build("slimpipe", Shape(p=3, n=4, m=1)))
    unit = Unit(0, 3, 0)
    assert slots.slot_of(0, Action(Op.HELP_FORWARD, unit, 2)) == slots.slot_of(2, Action(Op.FORWARD, unit))
    assert slots.slot_of(2, Action(Op.HELP_BACKWARD, unit, 0)) == slots.slot_of(0, Action(Op.BACKWARD, unit))


def test_other_schedules_are_refused() -> None:
    with pytest.raises(PlanError, match=r"pipeline.exchange needs pipeline.schedule = slimpipe.*found 1f1b"):
        slots_of(build("1f1b", Shape(p=2, m=2)))
