"""Lockstep slots of the slimpipe order: which units run beside each other (SlimPipe section 4.2).

Time counts in ticks of a forward slot and a backward slot. The k-th forward of rank r runs in the forward slot of tick
k + r, its k-th backward in the backward slot of tick n v + 2 (p-1) - 1 - r + k: the first backward of rank r falls
into the tick of its forward number n v + 2 (p-1-r) - 1, which is where its warm-up ends. So in any slot all ranks run
forwards or all run backwards, or have nothing to run, and every unit's input was made in an earlier slot. That holds
for every p, v, n and m that slimpipe supports, however few forwards there are.

Nothing makes ranks keep these times: they are an order in which any set of ranks can meet without a deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, NamedTuple

from slimpipe.schedule.action import Action, Op, Unit
from slimpipe.schedule.plan import Plan, PlanError, Shape

Kind = Literal["F", "B"]
KINDS: Final[tuple[Kind, ...]] = ("F", "B")

Pasts = tuple[int | None, ...]
"""By rank, how long the past of its unit in a slot is, in slices or parts of them; None where the rank is idle."""


class Slot(NamedTuple):
    """The forward ("F") or backward ("B") slot of a tick. Within a tick the forward slot comes first."""

    tick: int
    kind: Kind

    @property
    def order(self) -> int:
        """Slots in the order of time."""
        return 2 * self.tick + (self.kind == "B")

    def __str__(self) -> str:
        return f"{self.kind} slot of tick {self.tick}"


@dataclass(frozen=True)
class Slots:
    """Every F and B of a slimpipe plan in its slot. `forwards`, `backwards`: the units in each rank's order."""

    shape: Shape
    forwards: tuple[Unit, ...]
    backwards: tuple[Unit, ...]

    def units(self, kind: Kind) -> tuple[Unit, ...]:
        return self.forwards if kind == "F" else self.backwards

    def tick(self, rank: int, kind: Kind, index: int) -> int:
        """Tick of a rank's forward or backward number `index`."""
        p = self.shape.p
        return index + (rank if kind == "F" else self.first("B") + p - 1 - rank)

    def first(self, kind: Kind) -> int:
        """The first tick in which any rank has a forward or backward. From there on some rank has one, to the end."""
        return 0 if kind == "F" else self.shape.n * self.shape.v + self.shape.p - 2

    def index(self, slot: Slot, rank: int) -> int | None:
        """Which of its forwards or backwards the rank runs in the slot; None where it is idle."""
        index = slot.tick - self.tick(rank, slot.kind, 0)
        return index if 0 <= index < len(self.units(slot.kind)) else None

    def unit(self, slot: Slot, rank: int) -> Unit | None:
        """The unit that the rank runs in the slot; None where it is idle."""
        index = self.index(slot, rank)
        return None if index is None else self.units(slot.kind)[index]

    def slot(self, rank: int, kind: Kind, unit: Unit) -> Slot:
        """The slot of a rank's unit. Raises KeyError for a unit outside the shape."""
        return Slot(self.tick(rank, kind, self._index[kind][unit]), kind)

    def slot_of(self, rank: int, action: Action) -> Slot:
        """The slot of a rank's F, B, XF or XB. A helper's action names its owner and one of the owner's units."""
        kind: Kind = "F" if action.op in (Op.FORWARD, Op.HELP_FORWARD) else "B"
        return self.slot(rank if action.peer is None else action.peer, kind, action.unit)

    def of_kind(self, kind: Kind) -> Iterator[Slot]:
        """All slots of one kind in which some rank is busy, in order."""
        first, units = self.first(kind), len(self.units(kind))
        # An evaluation's plan has no backwards, hence no slots for them.
        return (Slot(tick, kind) for tick in range(first, first + units + self.shape.p - 1 if units else first))

    def pasts(self, kind: Kind, per_slice: int = 1) -> Iterator[tuple[Slot, Pasts]]:
        """Every slot of one kind with the pasts of the units in it, at so many parts a slice."""
        ranks, units = self.shape.p, self.units(kind)
        beyond = (None,) * (ranks - 1)
        pasts: Pasts = (*beyond, *(unit.slice * per_slice for unit in units), *beyond)
        # In forward slots a rank is one unit behind the rank before it, in backward slots one behind the rank after it.
        step = -1 if kind == "F" else 1
        for at, slot in enumerate(self.of_kind(kind)):
            yield slot, pasts[at : at + ranks][::step]

    def __iter__(self) -> Iterator[Slot]:
        """All slots in which some rank is busy, in the order of time."""
        return iter(sorted([*self.of_kind("F"), *self.of_kind("B")], key=lambda slot: slot.order))

    @cached_property
    def _index(self) -> dict[Kind, dict[Unit, int]]:
        return {
            "F": {unit: index for index, unit in enumerate(self.forwards)},
            "B": {unit: index for index, unit in enumerate(self.backwards)},
        }


def slots_of(plan: Plan) -> Slots:
    """The slots of a slimpipe plan, whatever else has been added to it.

    Raises PlanError for other schedules: their ranks are not in phase.
    """
    if plan.name != "slimpipe":
        raise PlanError(
            f"pipeline.exchange needs pipeline.schedule = slimpipe, whose ranks are in phase; found {plan.name}"
        )
    forwards = tuple(action.unit for action in plan.ranks[0] if action.op is Op.FORWARD)
    backwards = tuple(action.unit for action in plan.ranks[0] if action.op is Op.BACKWARD)
    return Slots(plan.shape, forwards, backwards)
