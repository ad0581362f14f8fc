"""Traffic over two carriers at once: each transfer goes by the one that is its."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, zeros

from slimpipe.runtime import traffic
from slimpipe.runtime.carrier import Carrier
from slimpipe.runtime.routes import Routes
from slimpipe.runtime.symmetric.neighbours import Site
from slimpipe.runtime.traffic import SplitExchange, SplitTransport, Traffic
from slimpipe.schedule import Link


class Noting:
    """A transport, an exchange and a batch that note what they are asked for."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes

    def post_receive(self, link: Link) -> Noting:
        self.notes.append(f"{self.name} receives {link}")
        return self

    def send(self, link: Link, tensor: Tensor) -> None:
        self.notes.append(f"{self.name} sends {link}")

    def finish(self) -> None:
        self.notes.append(f"{self.name} finishes")

    def allow(self, sends: int) -> None:
        self.notes.append(f"{self.name} allows {sends}")

    def post(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> Noting:
        self.notes.append(f"{self.name} to {[peer for _, peer in sends]} from {[peer for _, peer in receives]}")
        return self

    def wait(self) -> None:
        self.notes.append(f"{self.name} is waited for")

    def follow(self) -> bool:
        return self.name == "near"


def test_links_go_by_their_own_transport() -> None:
    notes: list[str] = []
    near, far = Noting("near", notes), Noting("far", notes)
    one, other, third = Link("F", 0, 1), Link("F", 1, 2), Link("B", 1, 0)
    split = SplitTransport({one: near, other: far, third: near})  # type: ignore[dict-item]
    split.post_receive(one)
    split.send(other, zeros(1))
    split.send(third, zeros(1))
    split.finish()
    split.allow(3)
    assert notes == [
        *("near receives F 0>1", "far sends F 1>2", "near sends B 1>0"),
        *("near finishes", "far finishes", "near allows 3", "far allows 3"),
    ]


def test_a_batch_is_split_by_peer_and_is_done_when_both_parts_are() -> None:
    notes: list[str] = []
    near, far = Noting("near", notes), Noting("far", notes)
    tensor = zeros(1)
    split = SplitExchange(near, (0, 1), far)
    batch = split.post([(tensor, 1), (tensor, 2), (tensor, 3)], [(tensor, 3), (tensor, 1)])
    batch.wait()
    assert notes == ["far to [2, 3] from [3]", "near to [1] from [1]", "far is waited for", "near is waited for"]
    assert not batch.follow()


def test_memory_that_cannot_be_shared_names_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the driver lets GPUs reach each other, handing the memory over may still fail."""

    def refuse(*_: object) -> None:
        raise RuntimeError("bind: File name too long\nframes of C++")

    monkeypatch.setattr(traffic.dist, "new_group", lambda *_, **__: object())
    monkeypatch.setattr(traffic, "CudaDevice", lambda device: object())
    monkeypatch.setattr(traffic, "CudaArena", refuse)
    sites = [Site("host", name, frozenset({"one", "two"} - {name})) for name in ("one", "two")]
    mine = Traffic(Routes(tuple(sites), True, "NCCL"), 0, [0, 1], Carrier(torch.device("cuda", 0), symmetric="auto"))
    message = (
        r"ranks \[0, 1\] cannot share 8\.0 MiB .*\(exchange\): bind: File name too long; set parallel\.carrier: nccl"
    )
    with pytest.raises(RuntimeError, match=message):
        mine.exchange({(0, 1): 8 * 2**20 - 512, (1, 0): 2**20})
