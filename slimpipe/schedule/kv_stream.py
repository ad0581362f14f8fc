"""Keys, values and their gradients in host memory, by layer: what each layer of a forward or backward copies.

Of a rank that streams, a layer's slots lie on the host, and `BUFFERS` layers' worth of room on the device. A layer's
copies in start as the layer before it begins, in the order in which the rank's list runs through layers; its copies out
start behind it. The order follows from the plan: no action of its own is needed (docs/pipeline_swap.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from slimpipe.schedule.action import Action, Op
from slimpipe.schedule.kv_slots import Ranges, RankSlots, join
from slimpipe.schedule.plan import Plan, PlanError, Shape

BUFFERS: Final = 2
"""Of each kind: one that is computed with, and one that is filled or emptied beside that."""


class SlotMoves(NamedTuple):
    """Slots that one layer of an action copies, as ranges: of K and V, and of dK and dV."""

    keys_in: Ranges
    gradients_in: Ranges
    keys_out: Ranges
    gradients_out: Ranges


def slot_moves(slot: int, past: Ranges, backward: bool, last: bool) -> SlotMoves:
    """Of a unit whose keys and values are in `slot`, those before it in `past`. `last`: its sequence's last slice.

    A forward reads its past and writes its own. A backward reads both, and adds to the gradients of its past; those of
    its own are complete, and are read. The last slice's backward is the first: it stores, and reads none.
    """
    if not backward:
        return SlotMoves(past, (), ((slot, slot + 1),), ())
    whole = join(past, slot)
    return SlotMoves(whole, () if last else whole, (), past)


def count(ranges: Ranges) -> int:
    """Slots in them."""
    return sum(stop - start for start, stop in ranges)


@dataclass(frozen=True)
class KVStream:
    """`ranks[r]`: whether rank r streams. `layers[r][c]`: layers of its chunk c. `keys`, `gradients`: bytes of K and V,
    of dK and dV, of one slot in one layer; `gradients` 0 where there are none (n = 1)."""

    ranks: tuple[bool, ...]
    layers: tuple[tuple[int, ...], ...]
    keys: int
    gradients: int

    def prove_made_for(self, plan: Plan) -> None:
        """Raises PlanError where it has other ranks or chunks than the plan."""
        shape = plan.shape
        if len(self.ranks) != shape.p or [len(chunks) for chunks in self.layers] != [shape.v] * shape.p:
            raise PlanError(f"{plan.name}: keys and values do not stream for p = {shape.p}, v = {shape.v}")

    def on_host(self, rank: int, slots: tuple[int, ...]) -> int:
        """Bytes of host memory, of a rank with so many slots by chunk."""
        layers = sum(count * of for count, of in zip(slots, self.layers[rank], strict=True))
        return layers * (self.keys + self.gradients) if self.ranks[rank] else 0

    def moved(self, plan: Plan, rank: int, slots: RankSlots) -> tuple[int, int]:
        """Bytes (out, in) in a step."""
        out = back = 0
        if self.ranks[rank]:
            for action in plan.compute(rank):
                moves = moves_of(plan.shape, slots, action)
                layers = self.layers[rank][action.unit.chunk]
                out += layers * (count(moves.keys_out) * self.keys + count(moves.gradients_out) * self.gradients)
                back += layers * (count(moves.keys_in) * self.keys + count(moves.gradients_in) * self.gradients)
        return out, back


def moves_of(shape: Shape, slots: RankSlots, action: Action) -> SlotMoves:
    """Of each layer of a forward or backward."""
    place = slots.places[action.unit]
    return slot_moves(place.slot, place.past, action.op is Op.BACKWARD, last=action.unit.slice == shape.n - 1)
