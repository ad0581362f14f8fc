"""Batches of the exchange through lanes: the values, whatever the order of streams and however small the rings."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from slimpipe.runtime.symmetric.exchange import SymmetricExchange
from slimpipe.runtime.traffic import ring_bytes
from tests.support.shared_memory import FakeArena, FakeDevice, Node, ended

RANKS = (0, 1, 2, 3)


def exchanges(node: Node, least: int) -> tuple[list[FakeDevice], list[SymmetricExchange]]:
    devices = [node.device() for _ in node.ranks]
    ends = [
        SymmetricExchange(node.ranks, rank, devices[rank], node.make_arena(rank), {(0, 1): 4096}, least)
        for rank in node.ranks
    ]
    return devices, ends


Transfer = tuple[int, int, Tensor]
"""Sender, receiver, what is sent."""


def plan(seed: int, batches: int) -> list[list[Transfer]]:
    """Random batches: any rank may send any other several tensors of any size."""
    some = random.Random(seed)
    found = []
    for _ in range(batches):
        pairs = [some.sample(RANKS, 2) for _ in range(some.randint(1, 8))]
        found.append([(src, dst, torch.rand(some.randint(1, 700))) for src, dst in pairs])
    return found


def run(node: Node, batches: Sequence[Sequence[Transfer]], least: int) -> list[tuple[Tensor, Tensor]]:
    """Every rank posts its part of each batch in turn and uses what came two batches later, as it would with NCCL.

    Pairs of what was sent and what came."""
    devices, ends = exchanges(node, least)
    pairs: list[tuple[Tensor, Tensor]] = []
    with ended(devices):
        buffers = [[(transfer, torch.zeros_like(transfer[2])) for transfer in batch] for batch in batches]
        for rank, end in enumerate(ends):
            compute, posted = devices[rank].compute, []
            for batch in buffers:
                sends = [(tensor.clone(), dst) for (src, dst, tensor), _ in batch if src == rank]
                receives = [(out, src) for (src, dst, _), out in batch if dst == rank]
                posted.append((end.post(sends, receives), [out for out, _ in receives]))
                for tensor, _ in sends:
                    compute.call(lambda tensor=tensor: tensor.fill_(-1))
                if len(posted) > 2:
                    posted[-3][0].wait()
            for under_way, _ in posted:
                assert under_way.follow()
        pairs = [(tensor, out) for batch in buffers for (_, _, tensor), out in batch]
    return pairs


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("least", [512, 1024, 8192])
def test_random_batches_arrive(least: int, seed: int) -> None:
    """With 512 bytes a ring most tensors go in parts, and rings are full all the time."""
    pairs = run(Node(RANKS, seed, slowest=0.0003), plan(seed, 12), least)
    assert pairs and all(torch.equal(sent, came) for sent, came in pairs)


def test_a_circle_of_full_rings_comes_loose() -> None:
    """Each sends its neighbours more than a ring holds, in an order in which each waits for another's first."""
    around = [(rank, (rank + step) % 4, torch.rand(2000)) for step in (1, 2, 3) for rank in RANKS]
    pairs = run(Node(RANKS, slowest=0.0003), [around, around[::-1], around], 512)
    assert all(torch.equal(sent, came) for sent, came in pairs)


def test_memory_is_predicted_to_the_byte() -> None:
    """For want of less, 4 MiB a pair; what the prediction says is what is asked for."""
    node = Node(RANKS)
    asked: list[int] = []
    need = {(0, 1): 5 * 2**20 + 1, (2, 1): 2**40}

    def make_arena(size: int) -> FakeArena:
        asked.append(size)
        return FakeArena({rank: torch.empty(size, dtype=torch.uint8) for rank in RANKS})

    device = node.device()
    with ended([device]):
        SymmetricExchange(RANKS, 1, device, make_arena, need)
    assert asked == [ring_bytes(RANKS, [], 0, 2, need)] == [12 * 128 + 512 * 2**20 + 2 * 4 * 2**20]


def test_a_batch_without_transfers_is_none() -> None:
    node = Node(RANKS)
    devices, ends = exchanges(node, 512)
    with ended(devices):
        ends[0].post([], []).wait()
    assert list(ends[0].waits()) == []


def test_who_waits_can_be_told() -> None:
    node = Node(RANKS)
    devices, ends = exchanges(node, 512)
    out = torch.zeros(10)
    batch = ends[2].post([], [(out, 3)])
    node.wait(lambda: list(ends[2].waits()) == ["for rank 3 to send in the exchange"])
    for _ in range(2):
        ends[2].post([(torch.ones(128), 0)], [])
    node.wait(lambda: "for rank 0 to receive in the exchange" in list(ends[2].waits()))
    ends[3].post([(torch.ones(10), 2)], [])
    for _ in range(2):
        ends[0].post([], [(torch.zeros(128), 2)])
    with ended(devices):
        batch.wait()
    assert bool((out == 1).all()) and list(ends[2].waits()) == []
