"""Pipeline sends over symmetric memory: a lane a link, whose ring holds as many slices as may be under way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from slimpipe.runtime.symmetric.arena import Arena, Lane, lay_out, open_lanes
from slimpipe.runtime.symmetric.lane import Device, Event, Stream
from slimpipe.runtime.symmetric.ring import padded
from slimpipe.runtime.transport import Receive
from slimpipe.schedule import Link

MakeArena = Callable[[int], Arena]
"""Of so many bytes a rank. Collective over the ranks of a node."""


def send_lanes(links: Iterable[Link], size: int, window: int) -> dict[Link, Lane]:
    """Of tensors of `size` bytes."""
    return {link: Lane(link.src, (link.dst,), window * padded(size)) for link in links}


class _Posted:
    def __init__(self, device: Device, event: Event, buffer: Tensor) -> None:
        self._device, self._event, self._buffer = device, event, buffer

    def wait(self) -> Tensor:
        self._device.current().follow(self._event)
        return self._buffer


class SymmetricTransport:
    """A `Transport` of the links inside one node; `links` are all of them, in the same order on every rank there.

    All tensors are [shape] of `dtype` on `where`. `window`: sends of a link that may be under way; one more waits, on
    the compute stream, until the oldest has been taken, as the plan's proof has it. Collective over the node.
    """

    def __init__(
        self,
        links: Iterable[Link],
        rank: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        where: torch.device,
        device: Device,
        make_arena: MakeArena,
        window: int,
    ) -> None:
        self.links, self._rank, self._device, self._make_arena = tuple(links), rank, device, make_arena
        self._shape, self._dtype, self._where = tuple(shape), dtype, where
        self._window = window
        self._sides: dict[Link, Stream] = {link: device.side() for link in self.links if link.dst == rank}
        self._open()
        self._meet()

    def _open(self) -> None:
        lanes = send_lanes(self.links, torch.Size(self._shape).numel() * self._dtype.itemsize, self._window)
        layout = lay_out(lanes)
        # Kept, for the lanes are views of it.
        self._arena = self._make_arena(layout.size)
        self._outgoing, self._incoming = open_lanes(lanes, layout, self._arena, self._rank)

    def _meet(self) -> None:
        """One transfer on each link: what does not work shows before the first step. Raises RuntimeError."""
        # First all that is sent, for which no rank waits: what is loaded and allocated on the way may wait for it.
        for link in self._outgoing:
            self.send(link, torch.full(self._shape, 1.0 + link.src, dtype=self._dtype, device=self._where))
        posted = {link: self.post_receive(link) for link in self._incoming}
        self._device.synchronize()
        for link, receive in posted.items():
            if not bool((receive.wait() == 1.0 + link.src).all()):
                raise RuntimeError(
                    f"link {link}: what came through shared memory is not what was sent; use another parallel.carrier"
                )

    def post_receive(self, link: Link) -> Receive:
        buffer = torch.empty(self._shape, dtype=self._dtype, device=self._where)
        side = self._sides[link]
        # The buffer's memory may be another tensor's, which the compute stream still reads.
        side.follow(self._device.current().record())
        return _Posted(self._device, self._incoming[link].get(side, buffer), buffer)

    def send(self, link: Link, tensor: Tensor) -> None:
        self._outgoing[link].put(self._device.current(), tensor)

    def finish(self) -> None:
        """Nothing to wait for: what was sent lies in the rings."""

    def allow(self, sends: int) -> None:
        """Makes larger rings. Between steps, when all that was sent has been received."""
        if sends > self._window:
            self._window = sends
            self._device.synchronize()
            self._open()

    def waits(self) -> Iterator[str]:
        """For the watchdog: what the device waits for, by whom."""
        for link, incoming in self._incoming.items():
            if incoming.waits():
                yield f"for rank {link.src} to send on link {link}"
        for link, outgoing in self._outgoing.items():
            if outgoing.waits():
                yield f"for rank {link.dst} to receive on link {link}"
