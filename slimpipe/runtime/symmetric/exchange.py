"""The exchange's transfers over symmetric memory: a lane for each ordered pair of a node's ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from slimpipe.runtime.symmetric.arena import Lane, lay_out, open_lanes
from slimpipe.runtime.symmetric.lane import Device, Event, Outgoing
from slimpipe.runtime.symmetric.ring import padded
from slimpipe.runtime.symmetric.transport import MakeArena

LEAST: Final = 4 * 2**20
"""Bytes of a pair's ring. What is larger than its ring goes in parts."""
MOST: Final = 512 * 2**20

Pair = tuple[int, int]
"""Sender, receiver."""


def exchange_lanes(ranks: Sequence[int], need: Mapping[Pair, int], least: int = LEAST) -> dict[Pair, Lane]:
    """`need`: bytes by ordered pair."""
    pairs = [(src, dst) for src in ranks for dst in ranks if src != dst]
    return {(src, dst): Lane(src, (dst,), padded(min(max(need.get((src, dst), 0), least), MOST))) for src, dst in pairs}


class _Batch:
    def __init__(self, device: Device, arrivals: Sequence[Event], sent: Sequence[tuple[Outgoing, int]]) -> None:
        self._device, self._arrivals, self._sent = device, arrivals, sent

    def wait(self) -> None:
        current = self._device.current()
        for event in self._arrivals:
            current.follow(event)

    def follow(self) -> bool:
        self.wait()
        for lane, number in self._sent:
            lane.follow(self._device.current(), number)
        return True


class SymmetricExchange:
    """`ExchangeTraffic` among `ranks`, all on one node. Collective over them, with the same `need`.

    `need`: bytes by ordered pair that should find room at once; less makes senders wait, and never for each other: a
    batch's receives are posted before anything is put, each sender's on a stream of its own, so a full ring is emptied
    whatever its sender does next.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        device: Device,
        make_arena: MakeArena,
        need: Mapping[Pair, int],
        least: int = LEAST,
    ) -> None:
        self._device = device
        lanes = exchange_lanes(ranks, need, least)
        layout = lay_out(lanes)
        self._arena = make_arena(layout.size)
        self._outgoing, self._incoming = open_lanes(lanes, layout, self._arena, rank)
        self._rank = rank
        self._sides = {peer: device.side() for peer in ranks if peer != rank}

    @torch.no_grad()
    def post(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> _Batch:
        current = self._device.current()
        posted = current.record() if receives else None
        arrivals: dict[int, Event] = {}
        for tensor, peer in receives:
            side = self._sides[peer]
            if peer not in arrivals:
                assert posted is not None
                side.follow(posted)
            arrivals[peer] = self._incoming[peer, self._rank].get(side, tensor)
        sent: dict[int, tuple[Outgoing, int]] = {}
        for tensor, peer in sends:
            lane = self._outgoing[self._rank, peer]
            sent[peer] = lane, lane.put(current, tensor)
        return _Batch(self._device, tuple(arrivals.values()), tuple(sent.values()))

    def waits(self) -> Iterator[str]:
        """For the watchdog: what the device waits for, by whom."""
        for (peer, _), incoming in self._incoming.items():
            if incoming.waits():
                yield f"for rank {peer} to send in the exchange"
        for (_, peer), outgoing in self._outgoing.items():
            if outgoing.waits():
                yield f"for rank {peer} to receive in the exchange"
