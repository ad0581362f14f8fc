"""The memory of each pipeline rank, predicted term by term before anything is allocated.

Eq. 1 of the SlimPipe paper counts `activations` and `KV slots` together; the others are what it leaves out. Sizes
are those of a Llama's layers; a model of one's own is taken for one of the same sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

from slimpipe.plan.hardware import loan_bytes
from slimpipe.plan.memory import kv_gradient_bytes, layer_bytes_per_token
from slimpipe.schedule import Exchange, KVStream, Op, Peaks, Plan, Swap, buffer_bytes, most_held, peak_held
from slimpipe.schedule.kv_stream import BUFFERS

if TYPE_CHECKING:
    from slimpipe.config import Config

KNOBS: Final = {
    "weights": "raise parallel.pp",
    "fp32 gradients": "raise parallel.pp",
    "optimizer": "raise parallel.pp",
    "activations": "raise pipeline.slices or parallel.pp",
    "KV slots": "set memory.kv_swap: on, raise parallel.pp, or lower data.sequence_length",
    "dK, dV": "set memory.kv_swap: on, raise parallel.pp, or lower data.sequence_length",
    "output layer": "lower train.ce_chunk",
    "transfers": "raise pipeline.slices",
    "loan buffers": "set pipeline.exchange: off, or raise pipeline.slices",
    "shared rings": "set parallel.carrier: nccl, or raise pipeline.slices",
    "waiting factors": "lower train.weight_grad_slices",
    "working set": "raise pipeline.slices",
    "workspaces": "use GPUs with more memory",
}
"""What to change where a term is too large."""
WORKSPACES: Final = 2 * 32 * 2**20
"""cuBLAS's on a GPU of Hopper's, one of 32 MiB for the main thread's forwards and one for autograd's backwards."""


@dataclass(frozen=True)
class Footprint:
    """Bytes of one rank by term, in the order of KNOBS."""

    terms: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.terms.values())

    @property
    def own(self) -> int:
        """What torch's allocator gives out: all but the memory that ranks share."""
        return self.total - self.terms["shared rings"]

    @property
    def remedy(self) -> str:
        """The largest term and its knob."""
        term = max(self.terms, key=lambda name: self.terms[name])
        return f"{term} take the most: {KNOBS[term]}"


@dataclass(frozen=True)
class Footprints:
    """Predicts every rank of a lowered and checked plan.

    `placement[g]`: stage g's layers. `parameters[r]`: how many numbers rank r trains. `ce_chunk`: tokens a chunk of the
    output layer. `send_window`: sends that a link may have under way. `fused`: on a GPU chains of elementwise
    operations are one kernel and make no temporaries in fp32. `near`: groups of ranks that send to each other through
    memory that they share, `rings[r]` bytes of it on rank r; without any all is NCCL's.
    """

    config: Config
    plan: Plan
    peaks: Peaks
    exchange: Exchange | None
    placement: Sequence[range]
    parameters: Sequence[int]
    ce_chunk: int
    send_window: int
    fused: bool
    near: Sequence[Sequence[int]] = ()
    rings: Sequence[int] = ()
    swap: Swap | None = None
    """The plan's; what is away is not counted."""
    kv: KVStream | None = None
    """The same of keys and values: of those that stream the room on the device is."""
    attention_scratch: Callable[[int, int, int], int] = lambda queries, keys, joined: 0
    """Bytes that attention's backward takes beside its results, by tokens of a slice, of the longest block of other
    keys, and of the longest of its own and those in front of them."""
    joins: bool = False
    """Whether a slice and the past in front of it may be one block of attention."""

    @cached_property
    def ranks(self) -> tuple[Footprint, ...]:
        loans = (0,) * self.plan.shape.p
        if self.exchange is not None:
            again = self.exchange.again
            sizes = loan_bytes(self.config.model, self._slice, self.config.train.micro_batch, self._element, again)
            loans = buffer_bytes(self.exchange, sizes)
        return tuple(Footprint(self._terms(rank, loans[rank])) for rank in range(self.plan.shape.p))

    def _terms(self, rank: int, loans: int) -> dict[str, int]:
        parameters, kept = self.parameters[rank], self._kept_by_layer
        # Masters where weights are rounded, and two moments.
        optimizer = (8 if self._element == 4 else 12) * parameters
        return {
            "weights": self._element * parameters,
            "fp32 gradients": 4 * parameters,
            "optimizer": optimizer,
            "activations": self._activations(rank, sum(kept.values()) - kept["k, v"]),
            "KV slots": sum(slots * layers * self._tokens * kept["k, v"] for slots, layers in self._in_room(rank)),
            "dK, dV": sum(
                kv_gradient_bytes(self.config.model, self.plan.shape, slots, layers, self._tokens * self.plan.shape.n)
                for slots, layers in self._in_room(rank)
            ),
            "output layer": self._output_layer(rank),
            "transfers": self._transfers(rank),
            "loan buffers": loans,
            "shared rings": self.rings[rank] if self.rings else 0,
            "waiting factors": self._waiting_factors(rank),
            "working set": self._working_set(rank),
            "workspaces": WORKSPACES if self.fused else 0,
        }

    @property
    def _element(self) -> int:
        return 2 if self.config.train.dtype == "bfloat16" else 4

    @property
    def _slice(self) -> int:
        return self.config.data.sequence_length // self.plan.shape.n

    @property
    def _tokens(self) -> int:
        """Of one unit, over its sequences."""
        return self._slice * self.config.train.micro_batch

    @property
    def _hidden(self) -> int:
        """Bytes of one unit's hidden states."""
        return self._tokens * self.config.model.hidden_size * self._element

    @cached_property
    def _kept_by_layer(self) -> dict[str, int]:
        return layer_bytes_per_token(self.config.model, self.config.memory.recompute, self._element)

    def _layers(self, rank: int, chunk: int) -> int:
        return len(self.placement[self.plan.shape.stage(rank, chunk)])

    def _slots(self, rank: int) -> list[tuple[int, int]]:
        """(slots, layers) of each chunk."""
        return [(slots, self._layers(rank, chunk)) for chunk, slots in enumerate(self.peaks.kv_slots[rank])]

    def _in_room(self, rank: int) -> list[tuple[int, int]]:
        """(slots, layers) that the device has room for: all, or of a rank whose keys and values stream the largest
        chunk's in a few layers."""
        if self.kv is None or not self.kv.ranks[rank]:
            return self._slots(rank)
        return [(max(self.peaks.kv_slots[rank]), BUFFERS)]

    def _activations(self, rank: int, layer: int) -> int:
        """The most that units in flight keep at once; `layer` bytes a token and layer outside the slots. A unit's
        layers share one rotary table, two fp32 halves of a head a position."""
        if self.swap is not None:
            sizes = self.swap.bytes
            return most_held(self.plan.ranks[rank], sizes.held[rank], sizes.movable[rank]).device
        rotary = 4 * self.config.model.head_dim * self._slice
        now = most = 0
        for action in self.plan.compute(rank):
            unit = self._layers(rank, action.unit.chunk) * layer * self._tokens + rotary
            if action.op is Op.FORWARD:
                now += unit
                most = max(most, now)
            else:
                now -= unit
        return most

    def _output_layer(self, rank: int) -> int:
        """Logits, their temporaries, and hidden-sized tensors that wait before and behind it."""
        shape, vocabulary = self.plan.shape, self.config.model.vocab_size
        temporaries = 0 if self.fused else 8
        if not self.config.vocab_parallel:
            if rank != shape.p - 1:
                return 0
            # A unit keeps the final norm's input and the output's gradient.
            waiting = 2 * self.peaks.kv_slots[rank][-1] * self._hidden
            return waiting + self.ce_chunk * vocabulary * (self._element + temporaries)
        columns, actions = -(-vocabulary // shape.p), self.plan.ranks[rank]
        found = self.peaks.logits[rank] * self._tokens * columns * self._element
        found += self.ce_chunk * columns * temporaries
        found += peak_held(actions, Op.HIDDEN, Op.GRADIENT) * self._hidden
        # The part of the hidden states' gradient that T makes is fp32.
        found += 2 * self._hidden * 4 // self._element
        if rank == shape.p - 1:
            found += peak_held(actions, Op.GRADIENT, Op.BACKWARD) * self._hidden * 4 // self._element
            found += self.peaks.kv_slots[rank][-1] * self._hidden
        if rank == 0:
            found += peak_held(actions, Op.EMBED, Op.FORWARD) * self._hidden
        return found + peak_held(actions, Op.EMBED_GRAD_OUT, Op.EMBED_GRAD) * self._hidden

    def _transfers(self, rank: int) -> int:
        """Hidden-sized tensors: receives posted and not yet used, and sends that may be under way on each link, but for
        those that lie in shared rings."""
        actions = self.plan.ranks[rank]
        received = peak_held(actions, Op.RECV_FORWARD, Op.FORWARD) + peak_held(actions, Op.RECV_BACKWARD, Op.BACKWARD)
        parts = 0
        near = next((group for group in self.near if rank in group), ())
        if len(near) == self.plan.shape.p and self.config.vocab_parallel and self.config.parallel.shares_passes:
            # A reduce's root has room for one part of the sum: of embeddings, of their like in fp32.
            parts += self._hidden if rank == 0 else 0
            parts += self._hidden * 4 // self._element if rank == self.plan.shape.p - 1 else 0
        links = {(action.op, action.peer) for action in actions if action.op.is_send and action.peer not in near}
        return (received + self.send_window * len(links)) * self._hidden + parts

    def _waiting_factors(self, rank: int) -> int:
        """Inputs and output gradients of each layer's four GEMMs, of the backwards whose weight gradients wait; and of
        one GEMM, those of all its slices joined. In the order of a backward: a layer's factors go one GEMM after the
        other, and the first layer to have its GEMMs holds the most."""
        model, slices = self.config.model, self.config.train.weight_grad_slices
        q_width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
        hidden, inner = model.hidden_size, model.intermediate_size
        widths = (inner + hidden, hidden + 2 * inner, q_width + hidden, hidden + q_width + 2 * kv_width)
        layers = sum(self._layers(rank, chunk) for chunk in range(self.plan.shape.v))
        backwards = self.plan.shape.m * self.plan.shape.n
        waiting = min(slices - 1, backwards)
        joined = gone = 0
        if 1 < slices <= backwards:
            for width in widths:
                joined = max(joined, slices * width - gone)
                gone += waiting * width
        return (waiting * layers * sum(widths) + joined) * self._tokens * self._element

    def _working_set(self, rank: int) -> int:
        """What one block's backward needs beside what is kept: what it makes again, and the larger of its two halves.

        MLP: the product made again and its gradient, that of gate and up, a hidden-sized input and gradient. Attention:
        gradients of q, of the output and two parts of dq; those of the longest past's keys and values, some of which
        may be for another rank; and what its kernel takes for the longest block of one call, while what the layer's
        MLP had kept is free again.
        """
        model, shape = self.config.model, self.plan.shape
        q_width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
        mlp = self._tokens * (4 * model.intermediate_size + 3 * model.hidden_size)
        attention = self._tokens * 5 * q_width + 2 * (shape.n - 1) * self._tokens * kv_width
        kept = sum(self._kept_by_layer.values())
        again = max(0, sum(layer_bytes_per_token(model, "norms", self._element).values()) - kept) * self._tokens
        free = self._tokens * 2 * model.intermediate_size
        if self.config.memory.recompute == "none":
            free += self._tokens * (model.intermediate_size + model.hidden_size)
        scratch = self.attention_scratch(self._slice, *self._longest_blocks(rank))
        return again + max(self._element * mlp, self._element * (attention - free) + scratch)

    def _longest_blocks(self, rank: int) -> tuple[int, int]:
        """Tokens of the longest stretches that a backward of the rank attends to at once, 0 where there is none: of
        other keys, which are the past that it does not lend, or what another rank lends to it; and of a slice joined to
        its past, which a rank that helps in the slot keeps apart."""
        longest = joined = 0
        for action in self.plan.compute(rank):
            if action.op is Op.BACKWARD and action.unit.slice:
                lent = () if self.exchange is None else self.exchange.backward_of(rank, action.unit)
                past = action.unit.slice * self._slice - sum(loan.tokens for loan in lent)
                helps = self.exchange is not None and self.exchange.helped_in(rank, action)
                if self.joins and past and not helps:
                    joined = max(joined, past + self._slice)
                else:
                    longest = max(longest, past)
        if self.exchange is not None:
            helped = (loan for slot in self.exchange.help_slots(rank) for loan in self.exchange.help_of(rank, slot))
            longest = max(longest, *(loan.tokens for loan in helped if loan.slot.kind == "B"), 0)
        return longest, joined
