"""Host links in the simulator: each rank copies to the host and back, one after another in each direction.

A copy out of a unit's activations starts at its O, a copy back at its R and not before the copy out is over. V waits
for the one, the unit's B for the other. Where a rank's keys and values stream (`schedule.kv_stream`), each layer of its
forwards and backwards waits for copies that the layer before it has started. Those have queues of their own, beside
those of activations; where there are both, each is taken to get half of the link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from slimpipe.schedule.action import Action, Op, Unit
from slimpipe.schedule.flow import Event, Flow, Rule
from slimpipe.schedule.kv_slots import RankSlots, assign_kv_slots
from slimpipe.schedule.kv_stream import BUFFERS, KVStream, count, moves_of
from slimpipe.schedule.loan_cost import Rate
from slimpipe.schedule.plan import Shape
from slimpipe.schedule.swap import UnitBytes


class Copied(NamedTuple):
    """A unit's activations are on the host, or back (`inward`)."""

    rank: int
    unit: Unit
    inward: bool

    def __str__(self) -> str:
        where = "back from the host" if self.inward else "copied to the host"
        return f"activations of {self.unit} {where} on rank {self.rank}"


class HostCopy(NamedTuple):
    """A copy's time on the link. `keys`: of keys and values, or their gradients, in one layer of the unit."""

    rank: int
    unit: Unit
    inward: bool
    start: float
    end: float
    keys: bool = False


class _Layer(NamedTuple):
    """One layer of an action of a rank that streams. `number` counts within the chunk."""

    action: Action
    number: int


@dataclass
class _Stream:
    """Where a rank's keys and values are in time.

    `fetched`: when the copies in of the next layer are over. `written`: of each (chunk, layer, operation), when what it
    wrote last is on the host. `gradients_out`: the same of every layer of a backward so far.
    """

    slots: RankSlots
    actions: tuple[Action, ...]
    share: float
    """Of the link."""
    done: int = 0
    before: _Layer | None = None
    fetched: float = 0.0
    backwards: int = 0
    written: dict[tuple[int, int, Op], float] = field(default_factory=dict)
    gradients_out: list[float] = field(default_factory=list)


class HostLinks:
    """All ranks' links. `rate` None: copies take no time. `waited`: by rank, time in which compute waited for copies
    of activations and for nothing else; `keys_waited`: the same of keys and values, which `kv` says."""

    def __init__(
        self, ranks: int, bytes: UnitBytes | None = None, rate: Rate | None = None, kv: KVStream | None = None
    ) -> None:
        self._bytes, self._rate, self._kv = bytes, rate, kv
        self._free = {(keys, inward): [0.0] * ranks for keys in (False, True) for inward in (False, True)}
        self._away: set[tuple[int, Unit]] = set()
        self._streams: dict[int, _Stream] = {}
        self.copies: list[HostCopy] = []
        self.waited = [0.0] * ranks
        self.keys_waited = [0.0] * ranks

    def copy(self, flow: Flow, rank: int, unit: Unit, inward: bool, time: float) -> None:
        size = 0 if self._bytes is None else self._bytes.movable[rank][unit.chunk]
        end = self._carry(rank, unit, inward, time, size, share=1.0)
        self._away.add((rank, unit))
        flow.post(Copied(rank, unit, inward), end)

    def awaited_by(self, rank: int, action: Action) -> tuple[Copied, ...]:
        """What a unit's backward waits for here; nothing where it stayed on the device."""
        if action.op is not Op.BACKWARD or (rank, action.unit) not in self._away:
            return ()
        return (Copied(rank, action.unit, inward=True),)

    def wait(self, rank: int, ready: float, copied: float) -> None:
        """Counts the wait of a rank that was ready but for a copy."""
        self.waited[rank] += max(0.0, copied - ready)

    def end_of(self, flow: Flow, rank: int, action: Action, start: float, end: float) -> float:
        """When a forward or backward ends that would last from `start` to `end` with its keys and values at hand."""
        kv = self._kv
        if kv is None or not kv.ranks[rank]:
            return end
        if rank not in self._streams:
            kv.prove_made_for(flow.plan)
            actions = flow.plan.compute(rank)
            beside = any(other.op.is_swap for other in flow.plan.ranks[rank])
            slots = assign_kv_slots(flow.plan.shape, actions)
            self._streams[rank] = _Stream(slots, actions, 0.5 if beside else 1.0)
        stream, shape = self._streams[rank], flow.plan.shape
        moves = moves_of(shape, stream.slots, action)
        layers = _layers(kv, rank, action)
        following = [_layers(kv, rank, other)[0] for other in stream.actions[stream.done + 1 : stream.done + 2]]
        now, each = start, (end - start) / len(layers)
        for layer, after in zip(layers, [*layers[1:], *following, None], strict=False):
            ready = max(stream.fetched, self._late(shape, stream, layer))
            self.keys_waited[rank] += max(0.0, ready - now)
            now = max(now, ready)
            if after is not None:
                stream.fetched = self._fetch(shape, rank, stream, after, now)
            now += each
            written = now
            for ranges, size in ((moves.keys_out, kv.keys), (moves.gradients_out, kv.gradients)):
                written = max(
                    written, self._carry(rank, action.unit, False, now, count(ranges) * size, stream.share, True)
                )
            stream.written[action.unit.chunk, layer.number, action.op] = written
            if action.op is Op.BACKWARD:
                stream.gradients_out.append(written)
            stream.before = layer
        stream.done += 1
        return now

    def _fetch(self, shape: Shape, rank: int, stream: _Stream, layer: _Layer, time: float) -> float:
        """When the copies in of a layer are over that are started at `time`."""
        assert self._kv is not None
        kv, unit = self._kv, layer.action.unit
        moves = moves_of(shape, stream.slots, layer.action)
        end = self._carry(rank, unit, True, time, count(moves.keys_in) * kv.keys, stream.share, True)
        if layer.action.op is Op.BACKWARD:
            # They go where others' were, which have to be out of it.
            before = stream.backwards - BUFFERS
            free = stream.gradients_out[before] if before >= 0 else 0.0
            stream.backwards += 1
            size = count(moves.gradients_in) * kv.gradients
            end = max(end, self._carry(rank, unit, True, max(time, free), size, stream.share, True))
        return end

    def _late(self, shape: Shape, stream: _Stream, layer: _Layer) -> float:
        """When that is there which the layer before has just written, if this is the same one and needs it."""
        before = stream.before
        if before is None or self._kv is None:
            return 0.0
        chunk = layer.action.unit.chunk
        if (before.action.unit.chunk, before.number) != (chunk, layer.number):
            return 0.0
        moves = moves_of(shape, stream.slots, layer.action)
        written = stream.written[chunk, layer.number, before.action.op]
        if before.action.op is Op.FORWARD:
            slot = stream.slots.places[before.action.unit].slot
            needed = any(start <= slot < stop for start, stop in moves.keys_in)
            return written + self._takes(self._kv.keys, stream.share) if needed else 0.0
        needed = layer.action.op is Op.BACKWARD and bool(moves.gradients_in)
        return written + self._takes(count(moves.gradients_in) * self._kv.gradients, stream.share) if needed else 0.0

    def _carry(
        self, rank: int, unit: Unit, inward: bool, time: float, size: int, share: float, keys: bool = False
    ) -> float:
        """When `size` bytes are there that are asked for at `time`. No keys are no copy."""
        if keys and not size:
            return time
        free = self._free[keys, inward]
        start = max(time, free[rank])
        end = free[rank] = start + self._takes(size, share)
        self.copies.append(HostCopy(rank, unit, inward, start, end, keys))
        return end

    def _takes(self, size: int, share: float) -> float:
        """No time where nobody says how large units are, either."""
        if self._rate is None or (self._bytes is None and self._kv is None):
            return 0.0
        return self._rate.latency + size / (share * self._rate.bandwidth)


class OffloadRule(Rule):
    def __init__(self, links: HostLinks) -> None:
        self._links = links

    def run(self, flow: Flow, rank: int, action: Action, start: float) -> None:
        self._links.copy(flow, rank, action.unit, inward=False, time=start)


class ReloadRule(Rule):
    def __init__(self, links: HostLinks) -> None:
        self._links = links

    def run(self, flow: Flow, rank: int, action: Action, start: float) -> None:
        out = flow.when(Copied(rank, action.unit, inward=False))
        self._links.copy(flow, rank, action.unit, inward=True, time=max(start, out or 0.0))


class VacateRule(Rule):
    """Holds its rank until the copy out is over."""

    def __init__(self, links: HostLinks) -> None:
        self._links = links
        self._arrived: dict[int, float] = {}

    def arrive(self, flow: Flow, rank: int, action: Action, time: float) -> None:
        self._arrived[rank] = time

    def needs(self, flow: Flow, rank: int, action: Action) -> Sequence[Event]:
        return (Copied(rank, action.unit, inward=False),)

    def run(self, flow: Flow, rank: int, action: Action, start: float) -> float:
        self._links.wait(rank, self._arrived[rank], start)
        return start


def _layers(kv: KVStream, rank: int, action: Action) -> list[_Layer]:
    """In the order in which an action comes to them."""
    numbers = range(kv.layers[rank][action.unit.chunk])
    return [_Layer(action, number) for number in (numbers if action.op is Op.FORWARD else reversed(numbers))]
