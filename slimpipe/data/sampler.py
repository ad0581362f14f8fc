"""Which tokens a step trains on: a function of the data, the seed and the step alone, whatever the layout of the
run."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from slimpipe.data.blend import Blend, whole_weights
from slimpipe.data.errors import DataError
from slimpipe.data.shuffle import Permutation
from slimpipe.data.tokens import TokenFile

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Part:
    """What a sampler takes of one token file: its tokens `start` to `stop - 1`."""

    key: str  # where it stands in the settings, as messages name it: `data.corpus`
    source: str
    tokens: TokenFile
    start: int
    stop: int
    weight: float = 1.0

    @property
    def count(self) -> int:
        return self.stop - self.start

    @property
    def fingerprint(self) -> str:
        return f"{self.tokens.fingerprint}[{self.start}:{self.stop}]"


@dataclass(frozen=True)
class Place:
    """Where a sequence was taken from: tokens `start` to `stop - 1` of a token file, that of the sampler's `part`."""

    part: int
    source: str
    start: int
    stop: int
    epoch: int

    def __str__(self) -> str:
        return f"{self.source}, tokens {self.start} to {self.stop - 1}, epoch {self.epoch}"


class SequenceSampler:
    """Deterministic batches out of token files.

    A part is cut into windows of S + 1 tokens with stride S (each window's last token is the next one's first: it is a
    label here and an input there). An epoch of a part takes every window once, in a permutation drawn from seed, epoch
    and the part's place among the parts. Several parts take turns by their weights (`slimpipe.data.blend`), each with
    epochs of its own. Sequences are numbered over the whole run, so that a step's batch depends on nothing but the
    step: not on the number of ranks, nor on where a run was resumed. Memory does not grow with the number of tokens.
    """

    def __init__(self, parts: Sequence[Part], sequence_length: int, seed: int, vocab_size: int | None = None) -> None:
        """Raises DataError if a part has not even one window. Tokens are checked against `vocab_size` as they are
        read."""
        self.parts, self.sequence_length, self.seed, self.vocab_size = tuple(parts), sequence_length, seed, vocab_size
        self.windows = tuple(max(0, part.count - 1) // sequence_length for part in parts)  # in an epoch, by part
        for part, windows in zip(parts, self.windows, strict=True):
            if windows < 1:
                raise DataError(
                    f"{part.key} = {part.source}: {part.count} tokens, needs at least {sequence_length + 1} "
                    "(data.sequence_length + 1); use a larger corpus or lower data.sequence_length"
                )
        self._weights = whole_weights([part.weight for part in parts])
        self._blend = Blend(self._weights)
        self._orders: dict[int, tuple[int, Permutation]] = {}  # by part: the epoch under way

    @property
    def fingerprint(self) -> str:
        """Of all that the order of the sequences is made from, less seed and sequence length."""
        marks = [f"{part.fingerprint} {weight}" for part, weight in zip(self.parts, self._weights, strict=True)]
        return hashlib.sha256("\n".join(marks).encode()).hexdigest()

    def require(self, global_batch: int) -> None:
        """Raises DataError if one epoch of everything has not enough sequences for a step."""
        if sum(self.windows) < global_batch:
            part = max(self.parts, key=lambda part: part.count)
            total = sum(part.count for part in self.parts)
            raise DataError(
                f"{part.key} = {part.source}: {total} tokens, needs at least "
                f"{global_batch * self.sequence_length + 1} (train.global_batch x data.sequence_length + 1); "
                "use a larger corpus or lower train.global_batch or data.sequence_length"
            )

    def sequences(self, start: int, count: int) -> Tensor:
        """Sequences `start` to `start + count - 1` of the run, int64 `[count, S + 1]`. Epochs roll over.

        Raises DataError for a token outside of the vocabulary.
        """
        return self.read(self.places(start, count))

    def places(self, start: int, count: int) -> list[Place]:
        """Where sequences `start` to `start + count - 1` are taken from."""
        self._seek(start)
        found = []
        for _ in range(count):
            part = self._blend.turn()
            epoch, position = divmod(self._blend.counts[part] - 1, self.windows[part])
            first = self.parts[part].start + self._order(part, epoch)(position) * self.sequence_length
            found.append(Place(part, self.parts[part].source, first, first + self.sequence_length + 1, epoch))
        return found

    def read(self, places: Sequence[Place]) -> Tensor:
        """The tokens of `places`, int64 `[len(places), S + 1]`: no other bytes of the files are read."""
        # Not above: processes that only build token files do without.
        import torch

        rows = np.empty((len(places), self.sequence_length + 1), dtype=np.int64)
        for row, place in zip(rows, places, strict=True):
            row[:] = self.parts[place.part].tokens.tokens[place.start : place.stop]
            self._check(row, place)
        return torch.from_numpy(rows)

    def batch(self, step: int, global_batch: int, dp_rank: int = 0, dp_size: int = 1) -> tuple[Tensor, Tensor]:
        """(tokens, labels) of step `step`, counted from 0: int64 `[global_batch / dp_size, S]` each, this data-parallel
        rank's share of the step's sequences. `dp_size` divides `global_batch`.

        Labels are shifted here, before anything is cut: a slice shifted by itself would lose its last target. Raises
        DataError if an epoch has fewer than `global_batch` sequences.
        """
        self.require(global_batch)
        return self.rows(step * global_batch, global_batch, dp_rank, dp_size)

    def rows(self, start: int, count: int, dp_rank: int = 0, dp_size: int = 1) -> tuple[Tensor, Tensor]:
        """(tokens, labels) of this rank's share of sequences `start` to `start + count - 1`, as `batch` has it."""
        return inputs_and_labels(self.read(self.places(*share(start, count, dp_rank, dp_size))))

    def counts(self, done: int) -> list[int]:
        """How many of the first `done` sequences each part gives."""
        self._seek(done)
        return list(self._blend.counts)

    def resume(self, counts: Sequence[int]) -> None:
        """Goes to the place at which the parts have given `counts`, at once: from the start it takes a moment for every
        million of sequences. Raises DataError if this blend never comes to such a place."""
        self._blend = Blend(self._weights, counts)

    def _seek(self, start: int) -> None:
        if len(self.parts) == 1:
            self._blend = Blend(self._weights, [start])
        elif start < self._blend.done:
            self._blend = Blend(self._weights)
        while self._blend.done < start:
            self._blend.turn()

    def _order(self, part: int, epoch: int) -> Permutation:
        known = self._orders.get(part)
        if known is None or known[0] != epoch:
            known = (epoch, Permutation(self.windows[part], f"slimpipe {self.seed} {epoch} {part}"))
            self._orders[part] = known
        return known[1]

    def _check(self, row: npt.NDArray[np.int64], place: Place) -> None:
        words = self.vocab_size
        if words is None or (row.min() >= 0 and row.max() < words):
            return
        bad = int(((row < 0) | (row >= words)).argmax())
        raise DataError(
            f"model.vocab_size = {words}: token {row[bad]} at place {place.start + bad} of {place.source} is outside "
            "of it; use the vocabulary that the tokens were made with, or other data"
        )


def share(start: int, count: int, dp_rank: int, dp_size: int) -> tuple[int, int]:
    """(first, number) of the sequences that a data-parallel rank takes of `count` from `start` on."""
    if count % dp_size or not 0 <= dp_rank < dp_size:
        raise ValueError(f"{count} sequences are not to be dealt to rank {dp_rank} of {dp_size}")
    mine = count // dp_size
    return start + dp_rank * mine, mine


def inputs_and_labels(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[count, S + 1] to inputs and the labels one token on, [count, S] each."""
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
