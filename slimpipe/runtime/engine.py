"""Carries out one rank's list of actions: a loop, and a table with one short method an operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from slimpipe.kernels.attention import AttentionBackend
from slimpipe.kernels.cross_entropy import Loss
from slimpipe.runtime.clock import Clock
from slimpipe.runtime.entry import enter
from slimpipe.runtime.kv_slots import LayerSlots, SlicePlace
from slimpipe.runtime.kv_streaming import SlotStreams, Visit
from slimpipe.runtime.loans import Loans
from slimpipe.runtime.slice_context import SliceContext
from slimpipe.runtime.sliced_attention import Exchanges
from slimpipe.runtime.stage import Stage
from slimpipe.runtime.transport import Receive, Transport
from slimpipe.runtime.vocabulary import VocabularyPasses
from slimpipe.runtime.watchdog import Progress
from slimpipe.schedule import Action, Op, Plan, Unit, assign_kv_slots
from slimpipe.schedule.lending import Range, without
from slimpipe.schedule.transfers import kind_of, link_of
from slimpipe.swap import UnitSwaps


@dataclass(frozen=True)
class Batch:
    """One step's data on this rank; every rank holds all of it.

    tokens, labels [m, b, S] int64, labels already shifted and -100 where not counted; scale [] fp32, 1 / valid tokens
    of the whole global batch.
    """

    tokens: Tensor
    labels: Tensor
    scale: Tensor


class Counter:
    """Counts what is in use, and the most that ever was."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def up(self) -> None:
        self.now += 1
        self.peak = max(self.peak, self.now)

    def down(self) -> None:
        self.now -= 1


class Engine:
    """Runs `plan`'s list for `rank`, a step at a time.

    `plan` is lowered and checked. `stages` are this rank's chunks; `vocabulary` carries out the vocabulary passes of
    a plan that has them, `loans` its exchange, `swaps` moves activations to the host and back. `trace`, if given, is
    called with a line an action. `layer_slots`: those of another engine, at least as many, to use in turn with it.
    `slot_streams`: where slots lie in host memory, what moves them.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        stages: Sequence[Stage],
        transport: Transport,
        clock: Clock,
        backend: AttentionBackend,
        slice_tokens: int,
        loss: Loss,
        ce_chunk: int,
        vocabulary: VocabularyPasses | None = None,
        loans: Loans | None = None,
        progress: Progress | None = None,
        trace: Callable[[str], None] | None = None,
        layer_slots: Sequence[Mapping[int, LayerSlots]] | None = None,
        swaps: UnitSwaps | None = None,
        slot_streams: SlotStreams | None = None,
    ) -> None:
        self.plan, self.rank, self.stages = plan, rank, stages
        self.shape, self.actions = plan.shape, plan.ranks[rank]
        self.transport, self.clock, self.backend, self.trace = transport, clock, backend, trace
        self.slice_tokens, self.loss, self.ce_chunk = slice_tokens, loss, ce_chunk
        self.vocabulary, self.loans = vocabulary, loans
        self.slots = assign_kv_slots(plan.shape, plan.compute(rank))
        self.slot_streams = slot_streams
        self.layer_slots: Sequence[Mapping[int, LayerSlots]] = layer_slots or [
            {layer: self._make_slots(layer, capacity) for layer in stage.layers}
            for stage, capacity in zip(stages, self.slots.capacity, strict=True)
        ]
        self._visits = () if slot_streams is None else tuple(self._all_visits())
        self.methods: Mapping[Op, Callable[[Action], None]] = {
            Op.FORWARD: self.forward,
            Op.BACKWARD: self.backward,
            Op.SEND_FORWARD: self.send,
            Op.SEND_BACKWARD: self.send,
            Op.RECV_FORWARD: self.post_receive,
            Op.RECV_BACKWARD: self.post_receive,
            Op.HELP_FORWARD: self.help,
            Op.HELP_BACKWARD: self.help,
            Op.OFFLOAD: self.offload,
            Op.VACATE: self.vacate,
            Op.RELOAD: self.reload,
            **(vocabulary.methods if vocabulary is not None else {}),
        }
        self.swaps = swaps
        self.swapped = {action.unit for action in self.actions if action.op is Op.OFFLOAD}
        self.progress = progress or Progress()
        self.units = Counter()
        self.kv_slots = [Counter() for _ in stages]
        self._taken: list[set[int]] = [set() for _ in stages]

    def _make_slots(self, layer: int, capacity: int) -> LayerSlots:
        accumulate = self.shape.n > 1
        if self.slot_streams is None:
            return LayerSlots(capacity, self.slice_tokens, accumulate)
        return self.slot_streams.make(capacity, self.slice_tokens, accumulate, layer)

    def _all_visits(self) -> Iterator[Visit]:
        for action in self.actions:
            if action.op.is_compute:
                layers, backward = self.stages[action.unit.chunk].layers, action.op is Op.BACKWARD
                for layer in reversed(layers) if backward else layers:
                    yield Visit(layer, self.place(action.unit), backward)

    def step(self, batch: Batch) -> Tensor:
        """Forward and backward of a whole step. The scaled loss on the rank of the last stage, zero elsewhere; [] fp32.

        Gradients are added into each parameter's `main_grad`. Nothing here waits for a GPU.
        """
        self._walk(batch)
        return self._loss if self.vocabulary is None else self._loss + self.vocabulary.loss

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """Of a forward-only plan: the loss of every token [m, b, S] fp32 on the last stage's rank, zero elsewhere.

        The batch's scale does not matter. No activation outlives its unit.
        """
        self._walk(batch)
        losses = torch.zeros(batch.labels.shape, dtype=batch.scale.dtype, device=batch.labels.device)
        by_unit = self._token_losses if self.vocabulary is None else self.vocabulary.token_losses
        for unit, found in by_unit.items():
            self._cut(losses, unit).copy_(found)
        return losses

    def _walk(self, batch: Batch) -> None:
        self._begin(batch)
        self.units, self.kv_slots = Counter(), [Counter() for _ in self.stages]
        for action in self.actions:
            self.progress.now(str(action))
            if self.trace:
                self.trace(self._describe(action))
            self.methods[action.op](action)
        self.progress.now("waiting for the last sends")
        self.transport.finish()
        if self.vocabulary is not None:
            self.vocabulary.finish()
        if self.swaps is not None:
            self.swaps.end()
        if self.slot_streams is not None:
            self.slot_streams.end()
        self.progress.now("end of the pipeline's step")
        self._check_empty()

    def _begin(self, batch: Batch) -> None:
        self._batch = batch
        self._loss = torch.zeros_like(batch.scale)
        self._one = torch.ones_like(batch.scale)
        self._token_losses: dict[Unit, Tensor] = {}
        self._saved: dict[Unit, tuple[list[Tensor], GradientEdge]] = {}
        self._receives: dict[tuple[Op, Unit], Receive] = {}
        self._outputs: dict[tuple[Op, Unit], Tensor] = {}
        self._handed: dict[tuple[Op, Unit], Tensor] = {}
        self._taken = [set() for _ in self.stages]
        if self.loans is not None:
            self.loans.begin()
        if self.swaps is not None:
            self.swaps.begin(batch.tokens, batch.labels)
        if self.slot_streams is not None:
            self.slot_streams.begin(self._visits)
        if self.vocabulary is not None:
            self.vocabulary.begin(self._tokens, self._labels, batch.scale, self.loss)

    def forward(self, action: Action) -> None:
        """Input from the data or the stage before; keep an edge of the output; hand the output on."""
        unit, stage = action.unit, self.stages[action.unit.chunk]
        with self.clock.waiting(action.op.value):
            x, gradient = self._input(action)
        with self.clock.busy(str(action)), self._saving(unit):
            out = stage.forward(x, self._context(unit))
            if stage.last and self.vocabulary is None:
                out = self._loss_of(stage, out, unit)
        self._open(unit)
        if torch.is_grad_enabled():
            # An edge, not the output: the output's storage is free as soon as it has been sent.
            self._saved[unit] = (gradient, get_gradient_edge(out))
        elif unit.slice == self.shape.n - 1:
            for slice_ in range(self.shape.n):
                self._close(Unit(unit.microbatch, slice_, unit.chunk))
        if not stage.last:
            self._hand_on(action, out.detach())
        elif self.vocabulary is not None:
            self.vocabulary.keep_hidden(unit, out.detach())

    def backward(self, action: Action) -> None:
        """Gradient from the loss or the stage behind; through the unit's graph; hand the input's gradient on."""
        unit, stage = action.unit, self.stages[action.unit.chunk]
        with self.clock.waiting(action.op.value):
            gradient = self._output_gradient(action)
        found, edge = self._saved.pop(unit)
        with self.clock.busy(str(action)):
            torch.autograd.backward((edge,), (gradient,))
        self._close(unit)
        if not stage.first:
            self._hand_on(action, found.pop())
        elif self.vocabulary is not None:
            self.vocabulary.keep_embedding_gradient(unit, found.pop())

    def help(self, action: Action) -> None:
        """An idle rank's part of others' attention, layer by layer beside its owners."""
        exchange = None if self.loans is None else self.loans.of(action)
        assert exchange is not None
        layers = range(len(self.stages[0].layers))
        with self.clock.busy(str(action)):
            for layer in layers if action.op is Op.HELP_FORWARD else reversed(layers):
                exchange.send_keys(layer, None)
                if action.op is Op.HELP_FORWARD or exchange.again:
                    forward = exchange.forward(None)
                    forward.help()
                    forward.collect()
                if action.op is Op.HELP_BACKWARD:
                    backward = exchange.backward(None)
                    backward.help()
                    backward.collect()

    def offload(self, action: Action) -> None:
        """Starts copying the unit's activations to the host, as soon as its forward is done."""
        assert self.swaps is not None
        self.swaps.offload(action.unit)

    def vacate(self, action: Action) -> None:
        """What follows waits for those copies, and may use the memory."""
        assert self.swaps is not None
        self.swaps.vacate(action.unit)

    def reload(self, action: Action) -> None:
        """Starts copying them back. The unit's backward waits for each as it comes to it."""
        assert self.swaps is not None
        self.swaps.reload(action.unit)

    def _saving(self, unit: Unit) -> AbstractContextManager[None]:
        if unit not in self.swapped:
            return nullcontext()
        assert self.swaps is not None
        return self.swaps.saving(unit)

    def send(self, action: Action) -> None:
        """The output of the unit's forward, or the gradient of its input, to the neighbour."""
        made_by = Op(kind_of(action.op))
        self.transport.send(link_of(self.rank, action), self._outputs.pop((made_by, action.unit)))

    def post_receive(self, action: Action) -> None:
        """Starts the receive; the unit's forward or backward waits for it."""
        used_by = Op(kind_of(action.op))
        self._receives[used_by, action.unit] = self.transport.post_receive(link_of(self.rank, action))

    def _loss_of(self, stage: Stage, hidden: Tensor, unit: Unit) -> Tensor:
        """The slice's scaled loss, added to the step's; without gradients, its tokens' losses."""
        if torch.is_grad_enabled():
            loss = stage.loss(hidden, self._labels(unit), self._batch.scale, self.ce_chunk, self.loss)
            self._loss += loss.detach()
            return loss
        losses = stage.token_losses(hidden, self._labels(unit), self.ce_chunk, self.loss)
        self._token_losses[unit] = losses
        return losses

    def place(self, unit: Unit) -> SlicePlace:
        """Where the unit's keys, values and past lie in its chunk's slots."""
        found = self.slots.places[unit]
        return SlicePlace(found.slot, found.past, last=unit.slice == self.shape.n - 1)

    def past_ranges(self, action: Action) -> tuple[list[Range], int]:
        """(positions of its past that a forward's or backward's rank computes itself, number of ranges it lends)."""
        lent = [] if self.loans is None else self.loans.lent_ranges(action)
        tokens = self.slice_tokens
        past = [(start * tokens, stop * tokens) for start, stop in self.place(action.unit).past]
        return without(past, lent), len(lent)

    def context(
        self, chunk: int, index: int, place: SlicePlace, device: torch.device, exchanges: Exchanges | None = None
    ) -> SliceContext:
        """What the blocks of `chunk` are given for slice `index` of a sequence."""
        start = index * self.slice_tokens
        positions = torch.arange(start, start + self.slice_tokens, device=device)
        return SliceContext(positions, place, self.layer_slots[chunk], self.backend, exchanges)

    def _context(self, unit: Unit) -> SliceContext:
        exchanges = None
        if self.loans is not None:
            backward = self.loans.of(Action(Op.BACKWARD, unit)) if torch.is_grad_enabled() else None
            exchanges = Exchanges(self.loans.of(Action(Op.FORWARD, unit)), backward)
        return self.context(unit.chunk, unit.slice, self.place(unit), self._batch.tokens.device, exchanges)

    def _input(self, action: Action) -> tuple[Tensor, list[Tensor]]:
        """(what the unit's first block, or its embedding, is given, where its gradient will be)."""
        if not self.stages[action.unit.chunk].first:
            x = self._take(action)
        elif self.vocabulary is not None:
            x = self.vocabulary.embedding(action.unit)
        else:
            return self._tokens(action.unit), []
        return enter(x) if torch.is_grad_enabled() else (x, [])

    def _output_gradient(self, action: Action) -> Tensor:
        """The gradient of what the unit's forward made."""
        if not self.stages[action.unit.chunk].last:
            return self._take(action)
        return self._one if self.vocabulary is None else self.vocabulary.hidden_gradient(action.unit)

    def _take(self, action: Action) -> Tensor:
        """What the action consumes: from the receive posted for it, or handed over by another chunk of this rank."""
        key = (action.op, action.unit)
        if key in self._handed:
            return self._handed.pop(key)
        return self._receives.pop(key).wait()

    def _hand_on(self, action: Action, tensor: Tensor) -> None:
        """To the stage that continues: at once where it is on this rank, else kept for the send that follows."""
        stage = self.shape.stage(self.rank, action.unit.chunk) + (1 if action.op is Op.FORWARD else -1)
        rank, chunk = self.shape.place(stage)
        if rank == self.rank:
            self._handed[action.op, Unit(action.unit.microbatch, action.unit.slice, chunk)] = tensor
        else:
            self._outputs[action.op, action.unit] = tensor

    def _tokens(self, unit: Unit) -> Tensor:
        return self._cut(self._batch.tokens, unit)

    def _labels(self, unit: Unit) -> Tensor:
        return self._cut(self._batch.labels, unit)

    def _cut(self, data: Tensor, unit: Unit) -> Tensor:
        start = unit.slice * self.slice_tokens
        return data[unit.microbatch, :, start : start + self.slice_tokens]

    def _open(self, unit: Unit) -> None:
        slot, taken = self.slots.places[unit].slot, self._taken[unit.chunk]
        if slot in taken:
            raise RuntimeError(f"rank {self.rank}, F{unit}: KV slot {slot} of chunk {unit.chunk} is still in use")
        taken.add(slot)
        self.units.up()
        self.kv_slots[unit.chunk].up()

    def _close(self, unit: Unit) -> None:
        self._taken[unit.chunk].remove(self.slots.places[unit].slot)
        self.units.down()
        self.kv_slots[unit.chunk].down()

    def _check_empty(self) -> None:
        if self.vocabulary is not None and self.vocabulary.left_over():
            raise RuntimeError(f"rank {self.rank}: vocabulary passes left over: {self.vocabulary.left_over()}")
        if self.loans is not None and self.loans.left_over():
            raise RuntimeError(f"rank {self.rank}: keys of {self.loans.left_over()} loans left over")
        if self.swaps is not None and self.swaps.left_over():
            raise RuntimeError(f"rank {self.rank}: units left in host memory: {self.swaps.left_over()}")
        left: dict[str, Mapping[Any, Any]] = {
            "units": self._saved,
            "receives": self._receives,
            "outputs": self._outputs,
            "inputs": self._handed,
        }
        for what, found in left.items():
            if found:
                raise RuntimeError(f"rank {self.rank}: {what} left over at the end of the step: {list(found)}")

    def _describe(self, action: Action) -> str:
        if action.op.is_send:
            return f"[rank {self.rank}] {action}  ──▶ rank {action.peer}"
        if action.op.is_recv:
            return f"[rank {self.rank}] {action}  ◀── rank {action.peer}"
        return f"[rank {self.rank}] {action}"
