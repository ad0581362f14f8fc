"""Moves activations and gradients between pipeline ranks (docs/architecture.md, "NCCL order").

NCCL runs the operations of one communicator in posting order. So every directed link has a communicator of its own, the
wrap p-1 -> 0 included: transfers of one link are in order by the plan, and no link can hold up another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from slimpipe.runtime.carrier import Carrier
from slimpipe.runtime.contact import contact_with
from slimpipe.schedule import Link


class Receive(Protocol):
    """A posted receive."""

    def wait(self) -> Tensor:
        """The tensor, once the work that follows may use it (the device waits, on a GPU not the host)."""
        ...


class Transport(Protocol):
    """Point-to-point transfers between pipeline ranks, in order on each link. All tensors have one shape."""

    def post_receive(self, link: Link) -> Receive:
        """Starts a receive; the host does not wait."""
        ...

    def send(self, link: Link, tensor: Tensor) -> None:
        """Starts a send; the transport keeps the tensor until it has gone out."""
        ...

    def finish(self) -> None:
        """Waits until every send of the step has gone out."""
        ...

    def allow(self, sends: int) -> None:
        """From now on at least so many sends of a link may be under way at once: another plan needs them."""
        ...


class _PostedReceive:
    def __init__(self, work: dist.Work, buffer: Tensor, link: Link, carrier: Carrier) -> None:
        self._work, self._buffer, self._link, self._carrier = work, buffer, link, carrier

    def wait(self) -> Tensor:
        with contact_with([self._link.src], f"receive on link {self._link}"):
            self._work.wait()
        return self._carrier.incoming(self._buffer)


class DistributedTransport:
    """torch.distributed point-to-point, gloo or NCCL, one group a directed link.

    `ranks[r]` is pipeline rank r's global rank. Creation is collective over all processes of the default group:
    everyone must pass the same links, in the same order (non-members take part only in name).
    """

    def __init__(
        self,
        links: Iterable[Link],
        rank: int,
        ranks: Sequence[int],
        shape: Sequence[int],
        dtype: torch.dtype,
        carrier: Carrier,
        send_window: int,
    ) -> None:
        self._rank, self._ranks, self._send_window = rank, ranks, send_window
        self._shape, self._dtype, self._carrier = tuple(shape), dtype, carrier
        self._groups: dict[Link, dist.ProcessGroup] = {}
        self._sends: dict[Link, deque[tuple[dist.Work, Tensor]]] = {}
        # A device makes NCCL build the communicator here, in this one order, and not at a first transfer in mid-step.
        for link in links:
            group = carrier.new_group([ranks[link.src], ranks[link.dst]], str(link))
            if rank in (link.src, link.dst):
                self._groups[link] = group
                self._sends[link] = deque()
        self._warm_up()

    def _warm_up(self) -> None:
        """One small transfer on each link, one after the other in the links' order: channels are set up here."""
        token = torch.zeros(1, dtype=self._dtype, device=self._carrier.memory)
        for link, group in self._groups.items():
            if self._rank == link.src:
                dist.send(token, self._ranks[link.dst], group=group)
            else:
                dist.recv(token, self._ranks[link.src], group=group)

    def post_receive(self, link: Link) -> Receive:
        buffer = self._carrier.empty(self._shape, self._dtype)
        with contact_with([link.src], f"receive on link {link}"):
            work = dist.irecv(buffer, self._ranks[link.src], group=self._groups[link])
        assert work is not None
        return _PostedReceive(work, buffer, link, self._carrier)

    def send(self, link: Link, tensor: Tensor) -> None:
        under_way = self._sends[link]
        while len(under_way) >= self._send_window:
            self._wait_oldest(link)
        tensor = self._carrier.outgoing(tensor)
        with contact_with([link.dst], f"send on link {link}"):
            work = dist.isend(tensor, self._ranks[link.dst], group=self._groups[link])
        assert work is not None
        under_way.append((work, tensor))

    def allow(self, sends: int) -> None:
        self._send_window = max(self._send_window, sends)

    def finish(self) -> None:
        for link, under_way in self._sends.items():
            while under_way:
                self._wait_oldest(link)

    def _wait_oldest(self, link: Link) -> None:
        work, _ = self._sends[link].popleft()
        with contact_with([link.dst], f"send on link {link}"):
            work.wait()
