"""Pipeline sends through lanes, with streams that are late by chance."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from slimpipe.runtime.symmetric.transport import SymmetricTransport
from slimpipe.runtime.traffic import ring_bytes
from slimpipe.schedule import Link
from tests.support.shared_memory import FakeArena, FakeDevice, Node, ended

CPU = torch.device("cpu")
SHAPE = (2, 3, 32)
LINKS = [Link("F", 0, 1), Link("F", 1, 2), Link("F", 2, 0), Link("B", 1, 0), Link("B", 2, 1), Link("B", 0, 2)]


def transports(node: Node, window: int) -> tuple[list[FakeDevice], list[SymmetricTransport]]:
    """One a rank. Each waits for the others as it is made, so they are made side by side."""
    from concurrent.futures import ThreadPoolExecutor

    devices = [node.device() for _ in node.ranks]

    def make(rank: int) -> SymmetricTransport:
        return SymmetricTransport(LINKS, rank, SHAPE, torch.float32, CPU, devices[rank], node.make_arena(rank), window)

    with ThreadPoolExecutor(len(devices)) as threads:
        return devices, list(threads.map(make, node.ranks))


def send_all(devices: Sequence[FakeDevice], ends: Sequence[SymmetricTransport], count: int, ahead: int) -> list[Tensor]:
    """`count` slices on each link; receives are posted `ahead` of what uses them. What came, less what was sent."""
    differences = [torch.full(SHAPE, float("nan")) for _ in range(count * len(LINKS))]
    for rank, end in enumerate(ends):
        compute = devices[rank].compute
        posted = {link: [] for link in LINKS}  # type: ignore[var-annotated]
        for index in range(count + ahead):
            for place, link in enumerate(LINKS):
                if link.dst == rank and index < count:
                    posted[link].append(end.post_receive(link))
                if link.src == rank and index < count:
                    tensor = value(index, place)
                    end.send(link, tensor)
                    compute.call(lambda tensor=tensor: tensor.fill_(-1))
                if link.dst == rank and index >= ahead:
                    at = index - ahead
                    came = posted[link][at].wait()
                    compute.call(
                        lambda came=came, at=at, place=place: differences[at * len(LINKS) + place].copy_(
                            came - value(at, place)
                        )
                    )
    return differences


def value(index: int, place: int) -> Tensor:
    return torch.arange(torch.Size(SHAPE).numel(), dtype=torch.float32).view(SHAPE) + 1000 * index + 100_000 * place


@pytest.mark.parametrize(("window", "ahead"), [(1, 1), (2, 2), (3, 0)])
def test_every_slice_arrives_on_every_link(window: int, ahead: int) -> None:
    node = Node((0, 1, 2), seed=window, slowest=0.0005)
    devices, ends = transports(node, window)
    with ended(devices):
        differences = send_all(devices, ends, 8, ahead)
    assert all(bool((difference == 0).all()) for difference in differences)


def test_another_plan_may_have_more_under_way() -> None:
    node = Node((0, 1, 2), slowest=0.0005)
    devices, ends = transports(node, 1)
    before = ends[0]._arena
    assert isinstance(before, FakeArena)
    assert before.memory[0].numel() == ring_bytes(node.ranks, [*LINKS, Link("F", 2, 3)], 4 * 2 * 3 * 32, 1, None)
    first = send_all(devices, ends, 4, 1)
    for device in devices:
        device.synchronize()
    for end in ends:
        end.allow(1)
    assert ends[0]._arena is before
    for end in ends:
        end.allow(4)
    with ended(devices):
        # Of the larger window, all slices of a link are sent before any of them is taken.
        for rank, end in enumerate(ends):
            for index in range(4):
                for place, link in enumerate(LINKS):
                    if link.src == rank:
                        end.send(link, value(index, place))
        for device in devices:
            device.synchronize()
        came = [(place, ends[link.dst].post_receive(link)) for _ in range(4) for place, link in enumerate(LINKS)]
        for device in devices:
            device.synchronize()
    assert all(bool((difference == 0).all()) for difference in first)
    for count, (place, receive) in enumerate(came):
        assert torch.equal(receive._buffer, value(count // len(LINKS), place))  # type: ignore[attr-defined]


def test_the_watchdog_is_told_who_waits_for_whom() -> None:
    node = Node((0, 1, 2))
    devices, ends = transports(node, 1)
    assert [list(end.waits()) for end in ends] == [[], [], []]
    receive = ends[1].post_receive(Link("F", 0, 1))
    node.wait(lambda: list(ends[1].waits()) == ["for rank 0 to send on link F 0>1"])
    for _ in range(2):
        ends[1].send(Link("B", 1, 0), value(0, 0))
    node.wait(
        lambda: sorted(ends[1].waits())[-1:] == ["for rank 0 to send on link F 0>1"] and len(list(ends[1].waits())) == 2
    )
    assert "for rank 0 to receive on link B 1>0" in list(ends[1].waits())
    ends[0].send(Link("F", 0, 1), value(0, 0))
    for _ in range(2):
        ends[0].post_receive(Link("B", 1, 0))
    with ended(devices):
        receive.wait()
    assert [list(end.waits()) for end in ends] == [[], [], []]


def test_memory_that_is_not_shared_is_found_out_before_the_first_step() -> None:
    node, other = Node((0, 1, 2)), Node((0, 1, 2))
    devices = [node.device(), other.device()]
    links = [Link("F", 0, 1)]
    SymmetricTransport(links, 0, SHAPE, torch.float32, CPU, devices[0], node.make_arena(0), 1)
    arena = other.make_arena(1)

    def counted(size: int) -> FakeArena:
        found = arena(size)
        found.bytes(1, 0, 4).view(torch.int32).fill_(1)
        return found

    with pytest.raises(
        RuntimeError, match=r"link F 0>1: what came .* is not what was sent; use another parallel\.carrier"
    ):
        SymmetricTransport(links, 1, SHAPE, torch.float32, CPU, devices[1], counted, 1)
