"""Vocabulary parallelism: embedding and output layer in rows over all pipeline ranks, no logits kept
(docs/vocabulary.md).

A slice's loss takes two passes on every rank. `S`: the last stage's output comes by broadcast; logits of the rank's
rows; three statistics a token go round. `T`: they give the loss and the gradient of the logits, hence the weight's
gradient and a part of the output's, which is reduced in fp32 to the last rank. Embedding: `E` looks up and reduces to
the first rank, `G` and `D` take the gradient back. Where these stand is the plan's business (schedule.vocabulary).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slimpipe.kernels.cross_entropy import (
    Loss,
    Rows,
    join_statistics,
    shard_gradient,
    shard_statistics,
    token_losses,
)
from slimpipe.kernels.embedding import add_shard_gradient, shard_embedding
from slimpipe.kernels.weight_grad import add_matmul, main_grad
from slimpipe.models.contract import initialise
from slimpipe.models.layers import Embedding
from slimpipe.runtime.clock import Clock
from slimpipe.runtime.collectives import Collectives, Pending
from slimpipe.runtime.stage import generator, parameter_names
from slimpipe.schedule import Action, Op, Unit

WINDOW = 2
"""Reduces whose contribution this rank may have under way before it waits for the oldest: bounds their buffers."""


@dataclass(frozen=True)
class Shard:
    """A rank's rows of a vocabulary-sized weight: `weight` [c, H], `rows.count` of them real, the rest padding."""

    weight: nn.Parameter
    rows: Rows


@dataclass(frozen=True)
class Shards:
    """The two weights' shards; one and the same object where they are tied."""

    embedding: Shard
    output: Shard


def cut(total: int, ranks: int, rank: int) -> tuple[Rows, int]:
    """This rank's rows of `total`, and the size every shard is padded to: the cut of DTensor's Shard(0)."""
    size = -(-total // ranks)
    first = rank * size
    return Rows(first, max(0, min(size, total - first)), total), size


@dataclass
class _Done:
    """A collective that was none."""

    result: Tensor

    def wait(self) -> Tensor:
        return self.result


@dataclass
class _Slice:
    """What is held of a slice from its S to its T."""

    hidden: Tensor
    logits: Tensor
    statistics: Pending


class VocabularyPasses:
    """Carries out E, H, S, T, L, G, D on one rank. Tensors: tokens, labels [b, s]; hidden and embedding [b, s, H]."""

    def __init__(
        self,
        shards: Shards,
        collectives: Collectives,
        ranks: int,
        rank: int,
        clock: Clock,
        chunk: int,
    ) -> None:
        self.shards, self._collectives, self._clock = shards, collectives, clock
        self._first, self._last, self._rank = 0, ranks - 1, rank
        self._chunk = chunk
        self.methods: Mapping[Op, Callable[[Action], None]] = {
            Op.EMBED: self._embed,
            Op.HIDDEN: self._hidden_out,
            Op.STATISTICS: self._statistics,
            Op.GRADIENT: self._gradient,
            Op.LOSS: self._slice_losses,
            Op.EMBED_GRAD_OUT: self._embedding_gradient_out,
            Op.EMBED_GRAD: self._add_embedding_gradient,
        }

    def warm_up(self, micro_batch: int, slice_tokens: int, loss: Loss) -> None:
        """Runs the passes' kernels once, then each collective once at its real size; adds zeros to the gradients.

        The collectives are the ranks' first meeting here, and all ranks take part. NCCL sets up an operation's
        connections at its first use, with allocations that can wait for the device: in a step, behind a receive that
        waits for a peer that waits for this rank, that would be a deadlock.
        """
        weight = self.shards.output.weight
        tokens = torch.zeros(micro_batch, slice_tokens, dtype=torch.int64, device=weight.device)
        self.begin(lambda unit: tokens, lambda unit: tokens, torch.zeros((), device=weight.device), loss)
        embedded = shard_embedding(tokens, self.shards.embedding.weight.detach(), self.shards.embedding.rows.first)
        hidden = embedded.flatten(0, -2)
        logits, statistics = self._shard_statistics(hidden, tokens.flatten())
        lse = join_statistics(statistics[None])[0]
        self._shard_gradient(_Slice(hidden, logits, _Done(statistics[None])), tokens.flatten(), lse)
        acc = main_grad(self.shards.embedding.weight)
        assert acc is not None
        add_shard_gradient(acc, tokens, torch.zeros_like(embedded), self.shards.embedding.rows.first)

        self._collectives.reduce("embedding", embedded, self._first).wait()
        self._collectives.broadcast("embedding", torch.zeros_like(embedded), self._first).wait()
        self._collectives.broadcast("output", torch.zeros_like(embedded), self._last).wait()
        parts = self._collectives.gather("output", statistics).wait()
        token_losses(join_statistics(parts), tokens.flatten(), self.shards.output.rows.total, self._loss).sum()
        wide = torch.zeros(embedded.shape, dtype=self._scale.dtype, device=weight.device)
        self._collectives.reduce("output", wide, self._last).wait().to(weight.dtype)

    def begin(
        self, tokens: Callable[[Unit], Tensor], labels: Callable[[Unit], Tensor], scale: Tensor, loss: Loss
    ) -> None:
        """Starts a step. `tokens` and `labels` give a unit's [b, s]."""
        self._tokens, self._labels, self._scale, self._loss = tokens, labels, scale, loss
        self.loss = torch.zeros_like(scale)
        self.token_losses: dict[Unit, Tensor] = {}
        self._embedded: dict[Unit, Pending] = {}
        self._made: dict[Unit, Tensor] = {}
        self._hidden: dict[Unit, Pending] = {}
        self._open: dict[Unit, _Slice] = {}
        self._hidden_gradients: dict[Unit, Pending] = {}
        self._embedding_gradients: dict[Unit, Tensor] = {}
        self._returning: dict[Unit, Pending] = {}
        self._under_way: dict[Op, deque[Pending]] = {Op.EMBED: deque(), Op.GRADIENT: deque()}

    def embedding(self, unit: Unit) -> Tensor:
        """First rank, in F: the slice's embedding."""
        return self._embedded.pop(unit).wait()

    def keep_hidden(self, unit: Unit, hidden: Tensor) -> None:
        """Last rank, in F: the output layer's input, which H sends round."""
        self._made[unit] = hidden

    def hidden_gradient(self, unit: Unit) -> Tensor:
        """Last rank, in B: the gradient of what `keep_hidden` was given."""
        return self._hidden_gradients.pop(unit).wait().to(self.shards.output.weight.dtype)

    def keep_embedding_gradient(self, unit: Unit, gradient: Tensor) -> None:
        """First rank, in B: the gradient of what `embedding` gave, which G sends round."""
        self._embedding_gradients[unit] = gradient

    def finish(self) -> None:
        """Waits for this rank's last contributions."""
        for under_way in self._under_way.values():
            while under_way:
                under_way.popleft().wait()

    def left_over(self) -> list[Unit]:
        """Units with something still held: none at the end of a sound step."""
        held = (self._embedded, self._made, self._hidden, self._open, self._hidden_gradients)
        return [unit for store in (*held, self._embedding_gradients, self._returning) for unit in store]

    def _embed(self, action: Action) -> None:
        shard = self.shards.embedding
        with self._clock.busy(str(action)):
            part = shard_embedding(self._tokens(action.unit), shard.weight.detach(), shard.rows.first)
        pending = self._collectives.reduce("embedding", part, self._first)
        if self._rank == self._first:
            self._embedded[action.unit] = pending
        else:
            self._contribute(Op.EMBED, pending)

    def _hidden_out(self, action: Action) -> None:
        tokens = self._tokens(action.unit)
        weight = self.shards.output.weight
        hidden = self._made.pop(action.unit, None)
        if hidden is None:
            hidden = weight.new_empty(*tokens.shape, weight.shape[1])
        self._hidden[action.unit] = self._collectives.broadcast("output", hidden, self._last)

    def _statistics(self, action: Action) -> None:
        with self._clock.waiting(action.op.value):
            hidden = self._hidden.pop(action.unit).wait().flatten(0, -2)
        labels = self._labels(action.unit).flatten()
        with self._clock.busy(str(action)):
            logits, statistics = self._shard_statistics(hidden, labels)
        self._open[action.unit] = _Slice(hidden, logits, self._collectives.gather("output", statistics))

    @torch.no_grad()
    def _shard_statistics(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [t, H], labels [t] -> this shard's logits [t, c] and statistics [3, t].

        Without gradients in training too: an evaluation's would be other code to the compiler, compiled in mid-pass."""
        shard = self.shards.output
        logits = hidden.new_empty(hidden.shape[0], shard.weight.shape[0])
        parts = []
        for rows in self._chunks(len(labels)):
            torch.mm(hidden[rows], shard.weight.detach().T, out=logits[rows])
            parts.append(shard_statistics(logits[rows], labels[rows], shard.rows.first, shard.rows.count))
        return logits, torch.cat(parts, -1)

    def _gradient(self, action: Action) -> None:
        unit, shard = action.unit, self.shards.output
        held = self._open.pop(unit)
        with self._clock.waiting(action.op.value):
            parts = held.statistics.wait()
        labels = self._labels(unit)
        flat = labels.flatten()
        with self._clock.busy(str(action)):
            statistics = join_statistics(parts)
            if self._rank == self._last:
                losses = token_losses(statistics, flat, shard.rows.total, self._loss)
                self.loss += losses.sum() * self._scale
            part = self._shard_gradient(held, flat, statistics[0])
        pending = self._collectives.reduce("output", part.view(*labels.shape, -1), self._last)
        if self._rank == self._last:
            self._hidden_gradients[unit] = pending
        else:
            self._contribute(Op.GRADIENT, pending)

    def _slice_losses(self, action: Action) -> None:
        unit = action.unit
        held = self._open.pop(unit)
        with self._clock.waiting(action.op.value):
            parts = held.statistics.wait()
        if self._rank == self._last:
            labels = self._labels(unit)
            with self._clock.busy(str(action)):
                statistics = join_statistics(parts)
                losses = token_losses(statistics, labels.flatten(), self.shards.output.rows.total, self._loss)
            self.token_losses[unit] = losses.view_as(labels)

    def _shard_gradient(self, held: _Slice, labels: Tensor, lse: Tensor) -> Tensor:
        """Adds the weight's gradient; returns this shard's part of the output's gradient [t, H] in fp32."""
        shard, loss, rows_held = self.shards.output, self._loss, self.shards.output.rows
        acc = main_grad(shard.weight)
        assert acc is not None, "a vocabulary shard is trained through its main_grad"
        part = torch.empty(held.hidden.shape, dtype=self._scale.dtype, device=held.hidden.device)
        for rows in self._chunks(len(labels)):
            shard_gradient(
                held.logits[rows],
                labels[rows],
                lse[rows],
                self._scale,
                rows_held.first,
                rows_held.count,
                rows_held.total,
                loss.z_loss,
                loss.smoothing,
            )
            _matmul_wide(held.logits[rows], shard.weight.detach(), part[rows])
        add_matmul(acc, held.logits, held.hidden)
        return part

    def _embedding_gradient_out(self, action: Action) -> None:
        gradient = self._embedding_gradients.pop(action.unit, None)
        if gradient is None:
            weight = self.shards.embedding.weight
            gradient = weight.new_empty(*self._tokens(action.unit).shape, weight.shape[1])
        self._returning[action.unit] = self._collectives.broadcast("embedding", gradient, self._first)

    def _add_embedding_gradient(self, action: Action) -> None:
        shard = self.shards.embedding
        with self._clock.waiting(action.op.value):
            gradient = self._returning.pop(action.unit).wait()
        acc = main_grad(shard.weight)
        assert acc is not None, "a vocabulary shard is trained through its main_grad"
        with self._clock.busy(str(action)):
            add_shard_gradient(acc, self._tokens(action.unit), gradient, shard.rows.first)

    def _contribute(self, op: Op, pending: Pending) -> None:
        """Keeps what this rank gave to a reduce until it has gone out; at most WINDOW of a kind."""
        under_way = self._under_way[op]
        under_way.append(pending)
        if len(under_way) > WINDOW:
            under_way.popleft().wait()

    def _chunks(self, tokens: int) -> list[slice]:
        return [slice(start, min(start + self._chunk, tokens)) for start in range(0, tokens, self._chunk)]


def build_shards(
    model: nn.Module, ranks: int, rank: int, *, std: float, seed: int, dtype: torch.dtype, device: torch.device
) -> tuple[Shards, dict[str, Shard]]:
    """This rank's rows of the model's two vocabulary-sized weights, and the same by layout-free name.

    The first values are those of the whole weight, of which the rank keeps its rows: the same in every layout.
    Padding is zero. Raises ValueError where the model's embedding is more than a table.
    """
    plain = type(model.embedding) is Embedding or (
        type(model.embedding) is nn.Embedding
        and model.embedding.padding_idx is None
        and model.embedding.max_norm is None
        and not model.embedding.scale_grad_by_freq
    )
    if not plain:
        raise ValueError(
            f"pipeline.vocab_parallel = true: the model's embedding is a {type(model.embedding).__name__}, not a plain "
            "table that can be cut into rows; set pipeline.vocab_parallel: false"
        )
    names = parameter_names(model)

    def make(meta: nn.Parameter) -> Shard:
        total, width = meta.shape
        rows, size = cut(total, ranks, rank)
        whole = torch.empty(total, width, dtype=dtype, device=device)
        initialise(model, names[meta], whole, std, generator(seed, names[meta], device))
        weight = torch.zeros(size, width, dtype=dtype, device=device)
        weight[: rows.count] = whole[rows.first : rows.first + rows.count]
        return Shard(nn.Parameter(weight), rows)

    first: nn.Parameter = model.embedding.weight  # type: ignore[assignment,union-attr]
    last: nn.Parameter = model.head.weight  # type: ignore[assignment,union-attr]
    embedding = make(first)
    output = embedding if last is first else make(last)
    return Shards(embedding, output), {names[first]: embedding, names[last]: output}


def _matmul_wide(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out [t, H] in fp32 = a [t, c] @ b [c, H] in the compute dtype, one GEMM on a GPU."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)
