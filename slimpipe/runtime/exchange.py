"""Attention context exchange: ranks compute part of each other's attention (docs/exchange.md; SlimPipe section 4.2).

Which rank lends what to whom is decided ahead of time (schedule.balance). In the forward of a loan, per layer, three
batches of transfers: `A`, keys and values of the lent range, at the layer's start, before its norm and projection; `B`,
the query; `C`, the helper's partial output and LSE, back. In the backward: `A` from a hook at the layer's output, which
fires first; `B`, query, output, LSE and the output's gradient; `C`, gradients of query, keys and values, back. Where a
backward runs attention again, the forward's `B` and `C` come behind `A`, with the same keys; the query is sent there.
A helper with a slice of its own in the slot does the lent part after its own, layer by layer; an idle one in an action
of its own. Every rank in a loan of a slot posts the same batches in the same order, on one communicator.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from slimpipe.kernels.attention import AttentionBackend
from slimpipe.kernels.fuse import wide
from slimpipe.runtime.carrier import Carrier
from slimpipe.runtime.clock import Clock
from slimpipe.runtime.contact import contact_with
from slimpipe.runtime.kv_slots import LayerSlots

Range = tuple[int, int]
"""Half-open range of token positions in a chunk's KV buffer."""


class Batch(Protocol):
    """Transfers under way together."""

    def wait(self) -> None:
        """Returns once the work that follows may use what was received; on a GPU the device waits, not the host.

        May be called again.
        """
        ...

    def follow(self) -> bool:
        """Makes a GPU's current stream wait for the transfers, for a clock to see their end. False where no stream can
        wait for them."""
        ...


class ExchangeTraffic(Protocol):
    """Grouped point-to-point transfers between pipeline ranks, on a communicator of their own."""

    def post(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> Batch:
        """Starts (tensor, rank) sends, and receives into given tensors. Tensors of a pair match in their order."""
        ...


class _Works:
    """`arrivals`: (buffer, tensor) pairs where what comes is received in other memory than where it is wanted."""

    def __init__(
        self, works: list[dist.Work], kept: list[Tensor], arrivals: list[tuple[Tensor, Tensor]], streams: bool
    ) -> None:
        self._works, self._kept, self._arrivals, self._streams = works, kept, arrivals, streams

    def wait(self) -> None:
        if self._streams:
            for work in self._works:
                work.wait()
            return
        # Once: gloo's wait for a receive that has been waited for never returns.
        while self._works:
            self._works.pop(0).wait()
        while self._arrivals:
            buffer, tensor = self._arrivals.pop()
            tensor.copy_(buffer)

    def follow(self) -> bool:
        if self._streams:
            self.wait()
        return self._streams


class DistributedExchange:
    """torch.distributed, gloo or NCCL. Creation is collective over all processes of the default group."""

    def __init__(self, ranks: Sequence[int], carrier: Carrier) -> None:
        self._ranks, self._carrier = ranks, carrier
        self._group = carrier.new_group(ranks, "exchange")
        dist.all_reduce(torch.zeros(1, device=carrier.memory), group=self._group)

    def post(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> Batch:
        outgoing = [(self._carrier.outgoing(tensor), peer) for tensor, peer in sends]
        incoming, arrivals = list(receives), []
        if self._carrier.through_host:
            incoming = [(self._carrier.empty(tensor.shape, tensor.dtype), peer) for tensor, peer in receives]
            arrivals = [(buffer, tensor) for (buffer, _), (tensor, _) in zip(incoming, receives, strict=True)]
        operations = [dist.P2POp(dist.isend, t, self._ranks[peer], self._group) for t, peer in outgoing]
        operations += [dist.P2POp(dist.irecv, t, self._ranks[peer], self._group) for t, peer in incoming]
        works = dist.batch_isend_irecv(operations) if operations else []
        kept = [tensor for tensor, _ in (*outgoing, *incoming)]
        return _Works(works, kept, arrivals, streams=self._carrier.backend == "nccl")


@dataclass(frozen=True)
class Lent:
    """A range of the rank's own past that `helper` computes. `keys`: whether K and V go there in this slot."""

    helper: int
    range: Range
    keys: bool = True


@dataclass(frozen=True)
class Helped:
    """`tokens` of `owner`'s past that this rank computes.

    `keys`: whether K and V come in this slot; else they were kept under `kept` in the forward. In a forward, `kept` not
    None means: keep them for the backward.
    """

    owner: int
    tokens: int
    keys: bool = True
    kept: Hashable | None = None


@dataclass(frozen=True)
class Shapes:
    """Of one layer's attention: micro-batch b, slice s, heads, kv_heads, head width d; dtype and device of compute."""

    b: int
    s: int
    heads: int
    kv_heads: int
    d: int
    dtype: torch.dtype
    device: torch.device


class Buffers:
    """Receive buffers, one flat piece a purpose, grown to the largest slot in the warm-up and reused from then on.

    Reuse is safe: a batch is posted behind the compute that last read its buffers, and the device keeps that order.
    """

    def __init__(self) -> None:
        self.flat: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(
        self, purpose: str, shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        """Tensors of these shapes, side by side in the buffer of `purpose`."""
        sizes = [-(-torch.Size(shape).numel() // 64) * 64 for shape in shapes]
        flat = self.flat.get((purpose, dtype))
        if flat is None or flat.numel() < sum(sizes):
            flat = self.flat[purpose, dtype] = torch.empty(sum(sizes), dtype=dtype, device=device)
        parts = flat[: sum(sizes)].split(sizes)
        return [part[: torch.Size(shape).numel()].view(shape) for part, shape in zip(parts, shapes, strict=True)]


@dataclass
class TrafficCount:
    """Bytes that a rank's exchange moved in a step."""

    sent: int = 0
    received: int = 0


Kept = dict[tuple[Hashable, int], tuple[Tensor, Tensor]]
"""Keys and values that helpers hold from a forward to its backward, by loan and layer."""


class LayerExchange:
    """One rank's loans in one slot, layer by layer: of a unit's forward, of its backward, or of an idle slot.

    `kind`: F or B; `action`: the rank's, F, B, XF or XB, under which waits are counted.
    """

    def __init__(
        self,
        lent: Sequence[Lent],
        helped: Sequence[Helped],
        traffic: ExchangeTraffic,
        buffers: Buffers,
        kept: Kept,
        backend: AttentionBackend,
        clock: Clock,
        shapes: Shapes,
        kind: str,
        action: str,
        traffic_count: TrafficCount,
        again: bool = False,
    ) -> None:
        self.lent, self.helped = tuple(lent), tuple(helped)
        self._traffic, self._buffers, self._kept = traffic, buffers, kept
        self.backend, self.shapes, self._clock, self._kind = backend, shapes, clock, kind
        self._action, self._count = action, traffic_count
        self.again = again
        """A backward's that runs attention again: `forward`, then `backward`, in each layer."""
        self._layer = 0
        self._queries: list[Tensor] = []
        self.keys: Batch | None = None
        self.keys_received: list[tuple[Tensor, Tensor]] = []

    def send_keys(self, layer: int, slots: LayerSlots | None) -> None:
        """Batch A. `layer` counts within the chunk; `slots` are the layer's, None where this rank owns nothing."""
        self._layer = layer
        sends: list[tuple[Tensor, int]] = []
        for loan in self.lent:
            if loan.keys:
                assert slots is not None
                sends += [(part.contiguous(), loan.helper) for part in slots.read(*loan.range)]
        parts = iter(self.take(f"{self._kind} keys"))
        self.keys_received = []
        receives: list[tuple[Tensor, int]] = []
        for helped in self.helped:
            if helped.keys:
                pair = next(parts), next(parts)
                receives += [(part, helped.owner) for part in pair]
            else:
                pair = self._kept.pop((helped.kept, layer))
            self.keys_received.append(pair)
        self.keys = self.post(sends, receives)

    def let_go(self) -> None:
        """At a layer's end: this object lives until the unit's backward, its keys need not."""
        self.keys, self.keys_received, self._queries = None, [], []

    def keep_keys(self) -> None:
        """After their arrival in a forward: those that the backward will want are copied out of the buffer."""
        for helped, (k, v) in zip(self.helped, self.keys_received, strict=True):
            if helped.kept is not None and helped.keys:
                self._kept[helped.kept, self._layer] = k.clone(), v.clone()

    def forward(self, q: Tensor | None) -> _ForwardUnderWay:
        """Batch B: the query goes to the helpers, the owners' come here. `q` None where this rank owns nothing."""
        received = self.take("query")
        sends = [(q.contiguous(), loan.helper) for loan in self.lent] if q is not None else []
        owners = [loan.owner for loan in self.helped]
        batch = self.post(sends, list(zip(received, owners, strict=True)))
        self._queries = received if self.again else []
        return _ForwardUnderWay(self, batch, received)

    def backward(self, owned: tuple[Tensor, Tensor, Tensor, Tensor] | None) -> _BackwardUnderWay:
        """Batch B: (q, out, lse, dout) go to the helpers, the owners' come here."""
        tensors, lses = iter(self.take("owner's")), self.take("owner's lse")
        receives: list[tuple[Tensor, int]] = []
        received: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        for index, loan in enumerate(self.helped):
            q = self._queries[index] if self.again else next(tensors)
            received.append((q, next(tensors), lses[index], next(tensors)))
            receives += [(part, loan.owner) for part in received[-1][self.again :]]
        sends = [(part.contiguous(), loan.helper) for loan in self.lent for part in (owned or ())[self.again :]]
        return _BackwardUnderWay(self, self.post(sends, receives), received)

    def take(self, purpose: str) -> list[Tensor]:
        """Receive buffers of one of `received`'s purposes."""
        return self._buffers.take(purpose, *self.received()[purpose], self.shapes.device)

    def received(self) -> dict[str, tuple[list[tuple[int, ...]], torch.dtype]]:
        """What one layer receives into: (shapes, dtype) by purpose."""
        x, lent, helped = self.shapes, len(self.lent), len(self.helped)
        of_a_slice: tuple[int, ...] = (x.b, x.s, x.heads, x.d)
        lse: tuple[int, ...] = (x.b, x.heads, x.s)

        def of_keys(tokens: int) -> tuple[int, ...]:
            return x.b, tokens, x.kv_heads, x.d

        keys = [of_keys(loan.tokens) for loan in self.helped if loan.keys for _ in range(2)]
        found: dict[str, tuple[list[tuple[int, ...]], torch.dtype]] = {f"{self._kind} keys": (keys, x.dtype)}
        if self._kind == "F" or self.again:
            found |= {
                "query": ([of_a_slice] * helped, x.dtype),
                "partial out": ([of_a_slice] * lent, x.dtype),
                "partial lse": ([lse] * lent, wide(x.dtype)),
            }
        if self._kind == "B":
            gradients = [(of_a_slice, *2 * (of_keys(loan.range[1] - loan.range[0]),)) for loan in self.lent]
            found |= {
                "owner's": ([of_a_slice] * (2 if self.again else 3) * helped, x.dtype),
                "owner's lse": ([lse] * helped, wide(x.dtype)),
                "gradients": ([shape for of_a_loan in gradients for shape in of_a_loan], x.dtype),
            }
        return found

    def reserve(self) -> None:
        """Has all the buffers that a layer needs take their memory."""
        for purpose in self.received():
            self.take(purpose)

    def post(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> Batch:
        """Starts a batch of transfers."""
        self._count.sent += sum(tensor.nbytes for tensor, _ in sends)
        self._count.received += sum(tensor.nbytes for tensor, _ in receives)
        if not (sends or receives):
            return self._traffic.post(sends, receives)
        begin = self._clock.mark()
        batch = self._traffic.post(sends, receives)
        self._clock.under_way(f"exchange {self._kind}", begin, batch.follow)
        return batch

    def wait(self, *batches: Batch | None) -> None:
        with self._clock.waiting(f"exchange {self._kind}", self._action):
            peers = sorted({loan.helper for loan in self.lent} | {loan.owner for loan in self.helped})
            with contact_with(peers, "exchange of attention"):
                for batch in batches:
                    if batch is not None:
                        batch.wait()


class _ForwardUnderWay:
    """From batch B to the merge. The caller computes its own causal block, then calls `help`, so that owners have their
    results early; computes its own past, and calls `collect`."""

    def __init__(self, exchange: LayerExchange, batch: Batch, queries: list[Tensor]) -> None:
        self._exchange, self._batch, self._queries = exchange, batch, queries

    def help(self) -> None:
        """Computes what owners lent to this rank, and posts batch C."""
        exchange = self._exchange
        sends: list[tuple[Tensor, int]] = []
        if exchange.helped:
            exchange.wait(exchange.keys, self._batch)
            exchange.keep_keys()
        for loan, q, (k, v) in zip(exchange.helped, self._queries, exchange.keys_received, strict=True):
            out, lse = exchange.backend.forward(q, k, v, causal=False)
            sends += [(out.contiguous(), loan.owner), (lse.contiguous(), loan.owner)]
        self._parts = list(zip(exchange.take("partial out"), exchange.take("partial lse"), strict=True))
        receives: list[tuple[Tensor, int]] = []
        for lent, (out, lse) in zip(exchange.lent, self._parts, strict=True):
            receives += [(out, lent.helper), (lse, lent.helper)]
        self._results = exchange.post(sends, receives)

    def collect(self) -> list[tuple[Tensor, Tensor]]:
        """(out, lse) of what this rank lent."""
        self._exchange.wait(self._exchange.keys, self._batch, self._results)
        if not self._exchange.again:
            self._exchange.let_go()
        return self._parts


class _BackwardUnderWay:
    """From batch B to the sums; `help` and `collect` as in the forward."""

    def __init__(
        self, exchange: LayerExchange, batch: Batch, received: list[tuple[Tensor, Tensor, Tensor, Tensor]]
    ) -> None:
        self._exchange, self._batch, self._received = exchange, batch, received

    def help(self) -> None:
        """Computes what owners lent to this rank, and posts batch C."""
        exchange = self._exchange
        sends: list[tuple[Tensor, int]] = []
        if exchange.helped:
            exchange.wait(exchange.keys, self._batch)
        for loan, (q, out, lse, dout), (k, v) in zip(
            exchange.helped, self._received, exchange.keys_received, strict=True
        ):
            gradients = exchange.backend.backward(dout, q, k, v, out, lse, causal=False)
            sends += [(gradient.contiguous(), loan.owner) for gradient in gradients]
        self._parts = exchange.take("gradients")
        helpers = [lent.helper for lent in exchange.lent for _ in range(3)]
        self._results = exchange.post(sends, list(zip(self._parts, helpers, strict=True)))

    def collect(self) -> list[tuple[Range, Tensor, Tensor, Tensor]]:
        """(range, dq, dk, dv) of what this rank lent."""
        exchange = self._exchange
        exchange.wait(exchange.keys, self._batch, self._results)
        exchange.let_go()
        dq, dk, dv = (self._parts[which::3] for which in range(3))
        return list(zip([lent.range for lent in exchange.lent], dq, dk, dv, strict=True))
