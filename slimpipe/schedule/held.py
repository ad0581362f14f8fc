"""Bytes that a rank's units in flight hold, action by action: on the device, and in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from slimpipe.schedule.action import Action, Op


class Held(NamedTuple):
    """While an action runs. What is on its way counts on both sides."""

    device: int
    host: int


def held_by_units(actions: Iterable[Action], held: Sequence[int], movable: Sequence[int]) -> list[Held]:
    """One entry an action of a rank's list; `held` and `movable`: bytes of a unit by chunk (`swap.UnitBytes`).

    A unit counts while its forward and its backward run. Memory on the device is free from its V, and taken again from
    its R; host memory is taken from its O to the end of its backward, since the copy back reads it until then.
    """
    device = host = 0
    offloaded = set()
    found = []
    for action in actions:
        unit = action.unit
        if action.op is Op.FORWARD:
            device += held[unit.chunk]
        elif action.op is Op.OFFLOAD:
            host += movable[unit.chunk]
            offloaded.add(unit)
        elif action.op is Op.VACATE:
            device -= movable[unit.chunk]
        elif action.op is Op.RELOAD:
            device += movable[unit.chunk]
        found.append(Held(device, host))
        if action.op is Op.BACKWARD:
            device -= held[unit.chunk]
            if unit in offloaded:
                host -= movable[unit.chunk]
    return found


def most_held(actions: Iterable[Action], held: Sequence[int], movable: Sequence[int]) -> Held:
    """The most of each at once; they need not come together."""
    found = held_by_units(actions, held, movable)
    return Held(max((now.device for now in found), default=0), max((now.host for now in found), default=0))
