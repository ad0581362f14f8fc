"""Loans: attention of one rank's unit that another rank computes (SlimPipe section 4.2; docs/exchange.md).

`schedule.balance` makes them ahead of time. An `Exchange` answers what a rank asks as it walks its list: what do I
lend in this forward or backward, and with what do I help in this slot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, NamedTuple

from slimpipe.schedule.action import Action, Op, Unit
from slimpipe.schedule.lending import Range
from slimpipe.schedule.slots import Kind, Slot, Slots

Mode = Literal["off", "pairwise", "balanced"]
MODES: Final[tuple[Mode, ...]] = ("off", "pairwise", "balanced")


class Loan(NamedTuple):
    """In `slot`, `helper` attends with the query of `owner`'s `unit` to positions [start, stop) of its past.

    Positions are tokens of the KV buffer of the unit's chunk: slot index x slice tokens + offset. In microbatches that
    grow from the buffer's right end they are no range of the sequence (`schedule.kv_slots`).
    """

    slot: Slot
    owner: int
    unit: Unit
    helper: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def range(self) -> Range:
        return self.start, self.stop

    def __str__(self) -> str:
        return (
            f"loan of positions {self.start} to {self.stop} of rank {self.owner}'s {self.slot.kind}{self.unit} to rank "
            f"{self.helper}"
        )


@dataclass(frozen=True)
class Exchange:
    """All loans of a plan. `granule`: loans start and stop at multiples of it, in tokens.

    `place` makes the loans when they are first asked for: for hundreds of thousands, finding them a place in the KV
    buffers takes longer than deciding on them.
    """

    mode: Mode
    slots: Slots
    slice_tokens: int
    granule: int
    place: Callable[[], Iterable[Loan]] = tuple
    again: bool = False
    """Whether a backward's loans serve attention's forward too, which runs again there."""

    @cached_property
    def loans(self) -> tuple[Loan, ...]:
        """In the order in which ranks post their transfers: by slot, and in a slot as they stand."""
        return tuple(self.place())

    @cached_property
    def by_slot(self) -> dict[Slot, tuple[Loan, ...]]:
        """Slots with loans, in the order of time."""
        found: defaultdict[Slot, list[Loan]] = defaultdict(list)
        for loan in self.loans:
            found[loan.slot].append(loan)
        return {slot: tuple(found[slot]) for slot in sorted(found, key=lambda slot: slot.order)}

    def forward_of(self, rank: int, unit: Unit) -> tuple[Loan, ...]:
        """What the rank lends in the unit's forward."""
        return self._lent.get((rank, "F", unit), ())

    def backward_of(self, rank: int, unit: Unit) -> tuple[Loan, ...]:
        """What the rank lends in the unit's backward."""
        return self._lent.get((rank, "B", unit), ())

    def help_of(self, rank: int, slot: Slot) -> tuple[Loan, ...]:
        """What others lend to the rank in the slot, whether it has a unit of its own there or not."""
        return self._helped.get((rank, slot), ())

    def help_slots(self, rank: int) -> tuple[Slot, ...]:
        """The slots in which the rank helps, in the order of time."""
        return self._help_slots.get(rank, ())

    def lent_in(self, rank: int, action: Action) -> tuple[Loan, ...]:
        """What the rank lends in an action of its list: something in F and B at most."""
        if action.op is Op.FORWARD:
            return self.forward_of(rank, action.unit)
        return self.backward_of(rank, action.unit) if action.op is Op.BACKWARD else ()

    def helped_in(self, rank: int, action: Action) -> tuple[Loan, ...]:
        """With what the rank helps in an action of its list: something in F, B, XF and XB at most."""
        return self.help_of(rank, self.slots.slot_of(rank, action)) if _meets(action) else ()

    def group_of(self, rank: int, slot: Slot) -> frozenset[int]:
        """The rank, and all ranks that loans of the slot bind to it, directly or through others."""
        return self._groups.get(slot, {}).get(rank) or frozenset((rank,))

    @cached_property
    def _lent(self) -> dict[tuple[int, Kind, Unit], tuple[Loan, ...]]:
        found: defaultdict[tuple[int, Kind, Unit], list[Loan]] = defaultdict(list)
        for loan in self.loans:
            found[loan.owner, loan.slot.kind, loan.unit].append(loan)
        return {key: tuple(loans) for key, loans in found.items()}

    @cached_property
    def _helped(self) -> dict[tuple[int, Slot], tuple[Loan, ...]]:
        found: defaultdict[tuple[int, Slot], list[Loan]] = defaultdict(list)
        for loan in self.loans:
            found[loan.helper, loan.slot].append(loan)
        return {key: tuple(loans) for key, loans in found.items()}

    @cached_property
    def _help_slots(self) -> dict[int, tuple[Slot, ...]]:
        found: defaultdict[int, dict[Slot, None]] = defaultdict(dict)
        for loan in self.loans:
            found[loan.helper][loan.slot] = None
        return {rank: tuple(sorted(slots, key=lambda slot: slot.order)) for rank, slots in found.items()}

    @cached_property
    def _groups(self) -> dict[Slot, dict[int, frozenset[int]]]:
        return {slot: groups(loans) for slot, loans in self.by_slot.items()}


def groups(loans: Sequence[Loan]) -> dict[int, frozenset[int]]:
    """Each rank of these loans, with all ranks that it is bound to through them."""
    bound: dict[int, set[int]] = {}
    for loan in loans:
        one, other = bound.setdefault(loan.owner, {loan.owner}), bound.setdefault(loan.helper, {loan.helper})
        if one is not other:
            one |= other
            for rank in other:
                bound[rank] = one
    return {rank: frozenset(ranks) for rank, ranks in bound.items()}


def _meets(action: Action) -> bool:
    return action.op.is_compute or action.op.is_help
