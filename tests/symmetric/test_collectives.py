"""Collectives out of shared memory: values to the bit, whatever the order of streams; broken ones give wrong values."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import pytest
import torch
from torch import Tensor

from slimpipe.runtime.symmetric.collectives import Sizes, SymmetricCollectives
from slimpipe.runtime.symmetric.lane import Outgoing
from slimpipe.runtime.traffic import ring_bytes
from slimpipe.schedule.collectives import Communicator
from tests.support.shared_memory import FakeArena, FakeDevice, Node, ended

CPU = torch.device("cpu")
SHAPE = (2, 96)
SIZES = Sizes(hidden=4 * 192, wide=4 * 192, statistics=4 * 30)


@dataclass
class Operation:
    """`given`: by rank; of a broadcast only the root's counts."""

    kind: str
    communicator: Communicator
    given: list[Tensor]

    @property
    def root(self) -> int:
        return 0 if self.communicator == "embedding" else len(self.given) - 1

    def post(self, rank: int, end: SymmetricCollectives, tensor: Tensor) -> object:
        if self.kind == "gather":
            return end.gather(self.communicator, tensor)
        return getattr(end, self.kind)(self.communicator, tensor, self.root)

    def expected(self, rank: int) -> Tensor | None:
        """None where it is undefined."""
        if self.kind == "gather":
            return torch.stack(self.given)
        if self.kind == "broadcast":
            return self.given[self.root]
        others = [tensor for other, tensor in enumerate(self.given) if other != self.root]
        return reduce(torch.add, others, self.given[self.root]) if rank == self.root else None


def operations(ranks: int, seed: int, count: int) -> list[Operation]:
    some, found = random.Random(seed), []
    for _ in range(count):
        kind, communicator = some.choice(
            [("reduce", "output"), ("broadcast", "output"), ("gather", "output")]
            + [("reduce", "embedding"), ("broadcast", "embedding")]
        )
        shape = (3, 10) if kind == "gather" else SHAPE
        found.append(Operation(kind, communicator, [torch.rand(shape) for _ in range(ranks)]))  # type: ignore[arg-type]
    return found


def ends_of(
    node: Node, pauses: dict[int, Callable[[], None]] | None = None
) -> tuple[list[FakeDevice], list[SymmetricCollectives]]:
    devices = [node.device(pause=(pauses or {}).get(rank)) for rank in node.ranks]
    return devices, [
        SymmetricCollectives(len(node.ranks), rank, device, node.make_arena(rank), SIZES, CPU)
        for rank, device in enumerate(devices)
    ]


def wrong(
    node: Node,
    work: list[Operation],
    pauses: dict[int, Callable[[], None]] | None = None,
    behind: int = 2,
    late: float = 0.0,
    held: float = 0.0,
) -> int:
    """Rank for rank all is posted in one order, and used `behind` operations later; how many results are wrong.

    What is given is made on the compute stream, `late` seconds after that could be, in memory that holds something else
    before, and is overwritten as soon as the operation has been waited for. Rank 1 takes nothing for `held` seconds."""
    devices, ends = ends_of(node, pauses)
    ends[1]._takes["output"].call(lambda: time.sleep(held))  # type: ignore[attr-defined]
    came: list[tuple[Tensor, Tensor]] = []
    with ended(devices):
        for rank, end in enumerate(ends):
            compute, posted = devices[rank].compute, []
            for index in range(len(work) + behind):
                if index < len(work):
                    tensor = torch.full_like(work[index].given[rank], float("nan"))
                    compute.call(lambda: time.sleep(late))
                    if work[index].kind != "broadcast" or rank == work[index].root:
                        compute.call(lambda to=tensor, of=work[index].given[rank]: to.copy_(of))
                    else:
                        compute.call(lambda to=tensor: to.fill_(-2))
                    posted.append((work[index].post(rank, end, tensor), tensor))
                if index >= behind:
                    pending, tensor = posted[index - behind]
                    result, expected = pending.wait(), work[index - behind].expected(rank)
                    if expected is not None:
                        kept = torch.full_like(expected, float("nan"))
                        compute.call(lambda to=kept, of=result: to.copy_(of))
                        came.append((kept, expected))
                    compute.call(lambda to=tensor, result=result: (to.fill_(-1), result.fill_(-1)))
    assert came
    return sum(not torch.equal(kept, expected) for kept, expected in came)


@pytest.mark.parametrize(("ranks", "seed"), [(2, 0), (3, 1), (4, 2), (4, 3)])
def test_results_are_right_to_the_bit(ranks: int, seed: int) -> None:
    """A reduce adds to its root's tensor the others' by rank. 30 operations through rings of two tensors."""
    assert wrong(Node(range(ranks), seed, slowest=0.0005), operations(ranks, seed, 30)) == 0


def slow() -> None:
    time.sleep(0.0005)


def at_once() -> None:
    pass


BROADCASTS = [Operation("broadcast", "output", [torch.rand(SHAPE) for _ in range(3)]) for _ in range(12)]
SLOW_READER = {0: at_once, 1: slow, 2: at_once}
ALL_SLOW = dict.fromkeys(range(3), slow)


def test_a_ring_is_written_again_only_when_all_have_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The root waits for each of its readers, not for the first alone, which here is quick."""
    assert wrong(Node(range(3)), BROADCASTS, SLOW_READER) == 0
    real = Outgoing.__init__

    def forgetful(self: Outgoing, ring: Tensor, ready: list[Tensor], taken: list[Tensor], first: int = 0) -> None:
        real(self, ring, ready, taken[:1], first)

    monkeypatch.setattr(Outgoing, "__init__", forgetful)
    assert wrong(Node(range(3)), BROADCASTS, SLOW_READER) > 0


@pytest.mark.parametrize("kind", ["reduce", "broadcast", "gather"])
def test_what_is_not_waited_for_is_wrong(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two broken versions: results used before they are there, tensors read before they are computed."""
    shape = (3, 10) if kind == "gather" else SHAPE
    work = [Operation(kind, "output", [torch.rand(shape) for _ in range(3)]) for _ in range(6)]
    assert wrong(Node(range(3)), work, ALL_SLOW, late=0.005) == 0
    with monkeypatch.context() as broken:
        broken.setattr("slimpipe.runtime.symmetric.collectives._Under.wait", lambda self: self._result)
        assert wrong(Node(range(3)), work, ALL_SLOW, behind=0) > 0
    with monkeypatch.context() as broken:
        broken.setattr(SymmetricCollectives, "_behind_compute", lambda self, stream: stream)
        assert wrong(Node(range(3)), work, late=0.005) > 0


@pytest.mark.parametrize("kind", ["reduce", "broadcast", "gather"])
def test_what_waits_for_room_in_a_ring_is_not_given_back(kind: str) -> None:
    """Rank 1 gives and does not take: others have its tensors, and may not yet have put theirs."""
    shape = (3, 10) if kind == "gather" else SHAPE
    work = [Operation(kind, "output", [torch.rand(shape) for _ in range(2)]) for _ in range(6)]
    assert wrong(Node(range(2), slowest=0.0), work, behind=3, held=0.2) == 0


def test_nobody_has_to_wait_for_posting() -> None:
    """A rank posts more than rings hold, alone; the others follow later, each in its own time."""
    node = Node(range(3), slowest=0.0005)
    devices, ends = ends_of(node)
    work = operations(3, 5, 16)
    results: dict[tuple[int, int], Tensor] = {}
    with ended(devices):
        for rank in (1, 0, 2):
            pending = [one.post(rank, ends[rank], one.given[rank].clone()) for one in work]
            time.sleep(0.01)
            results |= {(rank, index): one.wait() for index, one in enumerate(pending)}  # type: ignore[attr-defined]
    for (rank, index), result in results.items():
        expected = work[index].expected(rank)
        assert expected is None or torch.equal(result, expected)


def test_who_waits_can_be_told() -> None:
    node = Node(range(3))
    devices, ends = ends_of(node)
    tensor = torch.ones(SHAPE)
    assert [list(end.waits()) for end in ends] == [[], [], []]
    pending = ends[0].broadcast("output", torch.zeros(SHAPE), 2)
    node.wait(lambda: list(ends[0].waits()) == ["for rank 2 to post a broadcast of the output"])
    for _ in range(3):
        ends[2].broadcast("output", tensor, 2)
    node.wait(lambda: list(ends[2].waits()) == ["for others to take a broadcast of the output"])
    for rank, more in ((0, 2), (1, 3)):
        for _ in range(more):
            ends[rank].broadcast("output", torch.zeros(SHAPE), 2)
    with ended(devices):
        result = pending.wait()
    assert bool((result == 1).all()) and [list(end.waits()) for end in ends] == [[], [], []]


def test_memory_is_predicted_to_the_byte() -> None:
    """p 3: rank 2 has the broadcast of its output, a part of the embedding and its statistics, two of each; rank 0 and
    1 less or as much. Counters: a broadcast 3, two reduces 2 each, of both communicators, three gathers 3 each."""
    asked: list[int] = []

    def make_arena(size: int) -> FakeArena:
        asked.append(size)
        return FakeArena({rank: torch.zeros(size, dtype=torch.uint8) for rank in range(3)})

    device = Node(range(3)).device()
    sizes = Sizes(hidden=1024, wide=2048, statistics=100)
    with ended([device]):
        SymmetricCollectives(3, 2, device, make_arena, sizes, CPU)
    heads = -(-(2 * (3 + 2 * 2) + 3 * 3) * 64 // 512) * 512
    assert asked == [ring_bytes(range(3), [], 0, 2, None, sizes)] == [heads + 2 * (1024 + 2048 + 512)]
