"""Which tokens a step trains on: a function of the seed and the step alone, whatever the layout of the run."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slimpipe.data.errors import DataError
from slimpipe.data.tokens import TokenFile


class SequenceSampler:
    """Deterministic batches out of a token file.

    The file is cut into windows of S + 1 tokens with stride S (each window's last token is the next one's first: it is
    a label here and an input there). An epoch takes every window once, in a permutation drawn from (seed, epoch).
    Sequences are numbered over the whole run, so that a step's batch depends on nothing but the step: not on the
    number of ranks, nor on where a run was resumed.
    """

    def __init__(self, tokens: TokenFile, sequence_length: int, seed: int) -> None:
        """Raises DataError if the file has not even one window."""
        self.tokens = tokens
        self.sequence_length = sequence_length
        self.seed = seed
        self.windows = (tokens.count - 1) // sequence_length  # in an epoch
        self.require(1)
        self._epoch = 0
        self._order = self._permutation(0)

    def require(self, global_batch: int) -> None:
        """Raises DataError if one epoch has not enough sequences for a step."""
        if self.windows < global_batch:
            raise DataError(
                f"data.corpus = {self.tokens.source}: {self.tokens.count} tokens, needs at least "
                f"{global_batch * self.sequence_length + 1} (train.global_batch x data.sequence_length + 1); "
                "use a larger corpus or lower train.global_batch or data.sequence_length"
            )

    def sequences(self, start: int, count: int) -> Tensor:
        """Sequences `start` to `start + count - 1` of the run, int64 `[count, S + 1]`. Epochs roll over."""
        rows = np.empty((count, self.sequence_length + 1), dtype=np.int64)
        for i in range(count):
            epoch, position = divmod(start + i, self.windows)
            if epoch != self._epoch:
                self._epoch, self._order = epoch, self._permutation(epoch)
            first = int(self._order[position]) * self.sequence_length
            rows[i] = self.tokens.tokens[first : first + self.sequence_length + 1]
        return torch.from_numpy(rows)

    def batch(self, step: int, global_batch: int) -> tuple[Tensor, Tensor]:
        """(tokens, labels) of step `step`, counted from 0: int64 `[global_batch, S]` each.

        Labels are shifted here, before anything is cut: a slice shifted by itself would lose its last target. Raises
        DataError if an epoch has fewer than `global_batch` sequences.
        """
        self.require(global_batch)
        rows = self.sequences(step * global_batch, global_batch)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        # numpy promises the same raw bits of a bit generator for ever, but not the same `permutation`: sort the bits.
        bits = np.random.Philox(key=np.array([self.seed % 2**64, epoch], dtype=np.uint64)).random_raw(self.windows)
        return np.argsort(bits, kind="stable")
