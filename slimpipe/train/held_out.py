"""When a run evaluates, and on what: the same batches each time, so that its evaluations can be compared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from slimpipe.config import Config
    from slimpipe.data import SequenceSampler


class HeldOut:
    """The first `train.eval_batches` batches of the data kept for evaluation, in the order of the run's seed."""

    def __init__(self, config: Config, sampler: SequenceSampler | None) -> None:
        """Raises ValueError where the data kept is not enough for batches without repetition."""
        train = config.train
        self._every, self._last, self._size = train.eval_every, train.steps, train.global_batch
        if self._every is None:
            self._sampler = None
            return
        assert sampler is not None, "the settings name data for evaluation wherever train.eval_every is set"
        self._sampler, self._count = sampler, train.eval_batches
        sequences = sum(sampler.windows)
        have = sequences // self._size
        if have < self._count:
            lower = f"lower it to {have}, or " if have else ""
            raise ValueError(
                f"train.eval_batches = {self._count}: {sequences} sequences are kept for evaluation, enough for {have} "
                f"batches of {self._size} (train.global_batch); {lower}raise data.eval_share or evaluate on other data"
            )

    def due(self, step: int) -> bool:
        """Whether an evaluation follows step `step` (from 1): every so many steps, and after the last."""
        return self._every is not None and (step % self._every == 0 or step == self._last)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(tokens, labels), each as a training step takes them."""
        assert self._sampler is not None
        return (self._sampler.batch(index, self._size) for index in range(self._count))
