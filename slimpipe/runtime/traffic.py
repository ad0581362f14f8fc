"""Makes the pipeline's transport and exchange as its routes say: over shared memory, the process group, or both."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from slimpipe.runtime.carrier import Carrier
from slimpipe.runtime.collectives import Collectives, DistributedCollectives
from slimpipe.runtime.exchange import Batch, DistributedExchange, ExchangeTraffic
from slimpipe.runtime.routes import Routes
from slimpipe.runtime.symmetric.arena import lay_out
from slimpipe.runtime.symmetric.collectives import Sizes, SymmetricCollectives, collective_lanes
from slimpipe.runtime.symmetric.cuda import CudaArena, CudaDevice
from slimpipe.runtime.symmetric.exchange import Pair, SymmetricExchange, exchange_lanes
from slimpipe.runtime.symmetric.transport import SymmetricTransport, send_lanes
from slimpipe.runtime.transport import DistributedTransport, Receive, Transport
from slimpipe.schedule import Link


class Traffic:
    """Of one rank. `ranks[r]` is pipeline rank r's global rank. Its calls are collective over all processes of the
    default group: everyone makes the same things in the same order."""

    def __init__(self, routes: Routes, rank: int, ranks: Sequence[int], carrier: Carrier) -> None:
        self._routes, self._rank, self._ranks, self._carrier = routes, rank, ranks, carrier
        self._members = routes.group_of(rank)
        self._waits: list[Callable[[], Iterator[str]]] = []
        self._shared: dict[str, int] = {}
        groups = {
            group: dist.new_group([ranks[member] for member in group], group_desc="shared memory")
            for group in routes.groups
            if len(group) > 1
        }
        self._group = groups.get(self._members)
        self._device = CudaDevice(carrier.device) if self._group is not None else None

    def transport(self, links: Sequence[Link], shape: Sequence[int], dtype: torch.dtype, window: int) -> Transport:
        """All links of the plan; tensors of one shape."""
        far = [link for link in links if not self._routes.near(link.src, link.dst)]
        near = _within(self._members, links)
        by_link: dict[Link, Transport] = {}
        # Where no link is far, there is no communicator to set up either.
        if far or not links:
            group = DistributedTransport(far, self._rank, self._ranks, shape, dtype, self._carrier, window)
            by_link |= dict.fromkeys(far, group)
            if not near:
                return group
        if near:
            assert self._device is not None
            arena = partial(self._arena, "sends")
            shared = SymmetricTransport(
                near, self._rank, shape, dtype, self._carrier.device, self._device, arena, window
            )
            self._waits.append(shared.waits)
            by_link |= dict.fromkeys(near, shared)
            if not far:
                return shared
        return SplitTransport(by_link)

    def exchange(self, need: Mapping[Pair, int]) -> ExchangeTraffic:
        """`need`: bytes by (sender, receiver) that should find room in shared memory at once."""
        members = self._members
        shared: SymmetricExchange | None = None
        if self._device is not None:
            shared = SymmetricExchange(members, self._rank, self._device, partial(self._arena, "exchange"), need)
            self._waits.append(shared.waits)
            if len(members) == len(self._ranks):
                return shared
        group = DistributedExchange(self._ranks, self._carrier)
        return group if shared is None else SplitExchange(shared, members, group)

    def collectives(self, sizes: Sizes | None) -> Collectives:
        """Of the vocabulary passes. `sizes`: None where the process group is to carry them."""
        if sizes is None:
            return DistributedCollectives(self._ranks, self._rank, self._carrier)
        assert self._device is not None and len(self._members) == len(self._ranks)
        shared = SymmetricCollectives(
            len(self._ranks), self._rank, self._device, partial(self._arena, "vocabulary"), sizes, self._carrier.device
        )
        self._waits.append(shared.waits)
        return shared

    def waits(self) -> str | None:
        """What this rank's device waits for, and whom; None where it does not, or nobody can tell."""
        return "; ".join(what for waits in self._waits for what in waits()) or None

    @property
    def shared_bytes(self) -> int:
        """Memory of this rank that others read: torch's allocator knows nothing of it."""
        return sum(self._shared.values())

    def _arena(self, what: str, size: int) -> CudaArena:
        """Raises RuntimeError, naming the key, where torch or the driver refuses it."""
        assert self._group is not None
        self._shared[what] = size
        try:
            return CudaArena(self._group, self._members, size, self._carrier.device)
        except RuntimeError as error:
            raise RuntimeError(
                f"ranks {list(self._members)} cannot share {size / 2**20:.1f} MiB of their GPUs' memory ({what}): "
                f"{str(error).splitlines()[0]}; set parallel.carrier: nccl"
            ) from error


def ring_bytes(
    members: Collection[int],
    links: Sequence[Link],
    size: int,
    window: int,
    need: Mapping[Pair, int] | None,
    vocabulary: Sizes | None = None,
) -> int:
    """Shared memory of each of `members`, a group of `Routes`: for `window` sends of `size` bytes on each link, with
    `need` for the exchange, with `vocabulary` for its collectives."""
    if len(members) < 2:
        return 0
    near = _within(members, links)
    sends = lay_out(send_lanes(near, size, window)).size if near else 0
    loans = 0 if need is None else lay_out(exchange_lanes(sorted(members), need)).size
    passes = 0 if vocabulary is None else lay_out(collective_lanes(len(members), vocabulary)).size
    return sends + loans + passes


def _within(members: Collection[int], links: Sequence[Link]) -> list[Link]:
    return [link for link in links if link.src in members and link.dst in members]


class SplitTransport:
    """A `Transport` made of others, by link."""

    def __init__(self, by_link: Mapping[Link, Transport]) -> None:
        self._by_link = by_link
        self._parts = list({id(part): part for part in by_link.values()}.values())

    def post_receive(self, link: Link) -> Receive:
        return self._by_link[link].post_receive(link)

    def send(self, link: Link, tensor: Tensor) -> None:
        self._by_link[link].send(link, tensor)

    def finish(self) -> None:
        for part in self._parts:
            part.finish()

    def allow(self, sends: int) -> None:
        for part in self._parts:
            part.allow(sends)


class SplitExchange:
    """`ExchangeTraffic` with ranks `near` by one, with the others by another.

    What the other, which has an order over all ranks, is given, is every rank's batches in the plan's order still.
    """

    def __init__(self, shared: ExchangeTraffic, near: Sequence[int], others: ExchangeTraffic) -> None:
        self._shared, self._near, self._others = shared, frozenset(near), others

    def post(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> Batch:
        parts = []
        for traffic, near in ((self._others, False), (self._shared, True)):
            mine = [[pair for pair in pairs if (pair[1] in self._near) is near] for pairs in (sends, receives)]
            parts.append(traffic.post(*mine))
        return _Batches(parts)


class _Batches:
    def __init__(self, parts: Sequence[Batch]) -> None:
        self._parts = parts

    def wait(self) -> None:
        for part in self._parts:
            part.wait()

    def follow(self) -> bool:
        return all([part.follow() for part in self._parts])
