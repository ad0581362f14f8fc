"""Lanes carry every tensor, whole and in order, however late streams are; without one of their waits they do not."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from slimpipe.runtime.symmetric.arena import Lane, lay_out, open_lanes
from slimpipe.runtime.symmetric.lane import Incoming, Outgoing
from slimpipe.runtime.symmetric.ring import ALIGNMENT
from tests.support.shared_memory import FakeDevice, HostStream, Node, ThreadStream, ended, wrapped

COUNT = 24


def tensors(sizes: list[int]) -> list[Tensor]:
    """Of so many bytes each, in several dtypes and shapes."""
    found = []
    for index, size in enumerate(sizes):
        dtype = (torch.bfloat16, torch.float32, torch.int64)[index % 3]
        plain = torch.arange(size // dtype.itemsize) % 97 + 100 * index
        found.append(plain.to(dtype).view(2, -1) if index % 2 else plain.to(dtype))
    return found


def both_ends(capacity: int, sender: FakeDevice, receiver: FakeDevice, first: int = 0) -> tuple[Outgoing, Incoming]:
    lanes = {"lane": Lane(0, (1,), capacity)}
    layout = lay_out(lanes)
    arenas = [sender.node.make_arena(rank)(layout.size) for rank in (0, 1)]
    if first:
        for rank, start in ((1, 0), (0, 64)):
            arenas[0].bytes(rank, start, 4).view(torch.int32).fill_(wrapped(first))
    (out,), (into,) = (
        open_lanes(lanes, layout, arenas[0], 0)[0].values(),
        open_lanes(lanes, layout, arenas[1], 1)[1].values(),
    )
    if first:
        out, into = again(out, first), again(into, first)
    return out, into


def again(end: Outgoing | Incoming, first: int) -> Outgoing | Incoming:
    """The same end, with a count that began at `first`."""
    return type(end)(end._bytes, end._ready, end._taken, first)


def carry(
    node: Node,
    sent: list[Tensor],
    capacity: int,
    first: int = 0,
    pauses: tuple[Callable[[], None] | None, ...] = (None, None),
) -> list[Tensor]:
    """What comes of `sent`; each is overwritten as soon as the sender's stream is past its put."""
    sender, receiver = (node.device(pause=pause) for pause in pauses)
    outgoing, incoming = both_ends(capacity, sender, receiver, first)
    given = [tensor.clone() for tensor in sent]
    got = [torch.zeros_like(tensor) for tensor in sent]
    with ended([sender, receiver]):
        side = receiver.side()
        for tensor, out in zip(given, got, strict=True):
            outgoing.put(sender.compute, tensor)
            sender.compute.call(lambda tensor=tensor: tensor.fill_(-1))
            incoming.get(side, out)
    return got


def same(got: list[Tensor], sent: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, sent, strict=True))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_slices_arrive_in_order_through_fewer_slots_than_there_are(slots: int, seed: int) -> None:
    sent = tensors([3072] * COUNT)
    assert same(carry(Node((0, 1), seed), sent, slots * 3072), sent)


@pytest.mark.parametrize("capacity", [8, 5, 2])
def test_tensors_of_any_size_arrive(capacity: int) -> None:
    """With 2, some are larger than the ring and go in parts."""
    sent = tensors([(1 + 7 * i % 5) * 256 + 16 * i for i in range(COUNT)])
    assert same(carry(Node((0, 1)), sent, capacity * ALIGNMENT), sent)


def test_counters_may_wrap() -> None:
    sent = tensors([1024] * COUNT)
    for first in (2**32 - 5, 2**31 - 5):
        assert same(carry(Node((0, 1)), sent, 2048, first), sent)


def never() -> None:
    pass


def slow() -> None:
    time.sleep(0.001)


WITHOUT_ROOM, WITHOUT_READY = ((never, slow), (slow, never))


@pytest.mark.parametrize(("counter", "pauses"), [("_taken", WITHOUT_ROOM), ("_ready", WITHOUT_READY)])
def test_without_either_wait_values_are_wrong(
    counter: str, pauses: tuple[Callable[[], None], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender's for a free slot, where the receiver is slow; the receiver's for a full one, where the sender is."""
    sent = tensors([3072] * COUNT)
    assert same(carry(Node((0, 1)), sent, 2 * 3072, pauses=pauses), sent)
    real = ThreadStream.wait_until
    skipped: set[int] = set()

    def forgets(self: ThreadStream, found: Tensor, value: int) -> None:
        if found.data_ptr() not in skipped:
            real(self, found, value)

    monkeypatch.setattr(ThreadStream, "wait_until", forgets)
    made = open_lanes

    def noting(*arguments: object) -> object:
        ends = made(*arguments)  # type: ignore[arg-type]
        for end in (*ends[0].values(), *ends[1].values()):
            found = getattr(end, counter)
            skipped.update(one.data_ptr() for one in (found if isinstance(end, Outgoing) else (found,)))
        return ends

    monkeypatch.setattr("tests.symmetric.test_lanes.open_lanes", noting)
    assert not same(carry(Node((0, 1)), sent, 2 * 3072, pauses=pauses), sent)


def test_a_slot_given_back_before_it_is_read_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Incoming.get

    def early(self: Incoming, stream: ThreadStream, out: Tensor) -> object:
        self._taken_early = getattr(self, "_taken_early", 0) + 1
        stream.set(self._taken, self._taken_early)
        return real(self, stream, out)

    monkeypatch.setattr(Incoming, "get", early)
    sent = tensors([3072] * COUNT)
    assert not same(carry(Node((0, 1)), sent, 2 * 3072, pauses=WITHOUT_ROOM), sent)


def test_who_waits_can_be_told() -> None:
    """A receiver without a sender, and a sender that nobody reads."""
    node = Node((0, 1))
    sender, receiver = node.device(), node.device()
    outgoing, incoming = both_ends(512, sender, receiver)
    assert not outgoing.waits() and not incoming.waits()
    sent, out = torch.ones(512, dtype=torch.uint8), torch.zeros(512, dtype=torch.uint8)
    side = receiver.side()
    incoming.get(side, out)
    node.wait(incoming.waits)
    assert not outgoing.waits()
    for _ in range(3):  # one is taken, one lies in the ring
        outgoing.put(sender.compute, sent)
    node.wait(outgoing.waits)
    node.wait(lambda: not incoming.waits())
    with ended([sender, receiver]):
        for _ in range(2):
            incoming.get(side, out)
    assert not outgoing.waits() and not incoming.waits()


def test_host_streams_do_at_once_what_they_are_told() -> None:
    node = Node((0,))
    target = torch.zeros(4)
    HostStream(node, never).copy(target, torch.ones(4))
    assert bool((target == 1).all())
