"""Swaps: units whose activations spend the time between their forward and their backward in host memory
(docs/pipeline_swap.md).

`schedule.swap_choice` decides which and when, from times and bytes; `add_swap` makes actions of it, behind all other
passes: nothing here binds ranks together, so no other pass depends on it. Keys and values are `schedule.kv_stream`'s.

    O  behind the unit's F and what is sent behind that: its copies to the host start
    V  before a compute action of the rank's list: compute waits for those copies, and the memory is free
    R  before a later one, or the unit's own B: memory is taken, and the copies back start
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from slimpipe.schedule.action import Action, Op, Unit
from slimpipe.schedule.plan import Plan, PlanError, Shape


@dataclass(frozen=True)
class UnitBytes:
    """Of a unit of each rank's chunks, [rank][chunk]: what it holds on the device from its forward to its backward,
    keys and values left out, and the part of that which can go to the host."""

    held: tuple[tuple[int, ...], ...]
    movable: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        pairs = [pair for rows in zip(self.held, self.movable, strict=True) for pair in zip(*rows, strict=True)]
        if any(not 0 <= movable <= held for held, movable in pairs):
            raise PlanError(f"{self}: needs 0 <= movable <= held")

    @classmethod
    def equal(cls, shape: Shape) -> UnitBytes:
        """Every unit holds 1, all of which can go: schedules on paper."""
        ones = ((1,) * shape.v,) * shape.p
        return cls(ones, ones)


class Trip(NamedTuple):
    """The unit is away from before the rank's compute action number `vacate` to before number `reload`; its forward
    comes before the one, and its backward is the other at the latest."""

    unit: Unit
    vacate: int
    reload: int


@dataclass(frozen=True)
class Swap:
    """Trips by rank, in the order of their forwards.

    `budget`: by rank, the bytes that units in flight hold on the device at most. `wanted`: what was asked for; above it
    where moving everything would not have been enough.
    """

    bytes: UnitBytes
    trips: tuple[tuple[Trip, ...], ...]
    budget: tuple[float, ...]
    wanted: tuple[float, ...]

    @property
    def fits(self) -> bool:
        return all(held <= wanted for held, wanted in zip(self.budget, self.wanted, strict=True))

    def prove_made_for(self, plan: Plan) -> None:
        """Raises PlanError where it has other ranks or chunks than the plan."""
        p, v = plan.shape.p, plan.shape.v
        for what in (self.trips, self.budget, self.wanted, self.bytes.held):
            if len(what) != p:
                raise PlanError(f"{plan.name}: the swap was made for {len(what)} ranks, and p = {p}")
        if any(len(chunks) != v for chunks in self.bytes.held):
            raise PlanError(f"{plan.name}: the swap was not made for v = {v} chunks a rank")

    def moved(self, rank: int) -> int:
        """Bytes that go out in a step, and come back."""
        return sum(self.bytes.movable[rank][trip.unit.chunk] for trip in self.trips[rank])


def add_swap(plan: Plan, swap: Swap) -> Plan:
    """The plan with O, V and R actions. Raises PlanError where it has some already, or a trip that cannot be made."""
    if plan.has_swap:
        raise PlanError(f"{plan.name}: has swaps already")
    swap.prove_made_for(plan)
    return Plan(plan.name, plan.shape, tuple(tuple(_rank(plan, rank, swap)) for rank in range(plan.shape.p)))


def _rank(plan: Plan, rank: int, swap: Swap) -> Iterator[Action]:
    trips = {trip.unit: trip for trip in swap.trips[rank]}
    vacated, reloaded = defaultdict[int, list[Unit]](list), defaultdict[int, list[Unit]](list)
    for trip in swap.trips[rank]:
        vacated[trip.vacate].append(trip.unit)
        reloaded[trip.reload].append(trip.unit)
    places = {action: at for at, action in enumerate(plan.compute(rank))}
    backwards = {action.unit: at for action, at in places.items() if action.op is Op.BACKWARD}
    if not trips.keys() <= backwards.keys():
        raise PlanError(f"{plan.name}: rank {rank} has no backward of {min(trips.keys() - backwards.keys())}")
    if len(trips) < len(swap.trips[rank]):
        raise PlanError(f"{plan.name}: rank {rank} has two trips of one unit")
    for unit, vacate, reload in trips.values():
        forward = places[Action(Op.FORWARD, unit)]
        if not forward < vacate <= reload <= backwards[unit]:
            raise PlanError(
                f"{plan.name}: rank {rank}: {unit} cannot be away from {vacate} to {reload}: its forward is the rank's "
                f"compute action {forward}, its backward {backwards[unit]}"
            )
    done = 0
    due: Unit | None = None
    for action in plan.ranks[rank]:
        if due is not None and not action.op.is_send:
            yield Action(Op.OFFLOAD, due)
            due = None
        if action.op.is_compute:
            yield from _of(Op.VACATE, vacated[done])
            # What is needed first comes first.
            yield from _of(Op.RELOAD, sorted(reloaded[done], key=lambda unit: backwards[unit]))
            done += 1
            if action.op is Op.FORWARD and action.unit in trips:
                due = action.unit
        yield action


def _of(op: Op, units: Iterable[Unit]) -> Iterator[Action]:
    return (Action(op, unit) for unit in units)
