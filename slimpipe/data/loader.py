"""The run's place in its data: a few numbers, part of the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slimpipe.data.errors import DataError
from slimpipe.data.sampler import Place, SequenceSampler, inputs_and_labels, share

if TYPE_CHECKING:
    from torch import Tensor


class Loader:
    """Hands out a run's batches one after the other.

    Its place is the number of sequences that all data-parallel ranks together have taken: it holds whatever their
    number, and `global_batch` may change between two runs. Each rank has a loader, with the same state.
    """

    def __init__(self, sampler: SequenceSampler, global_batch: int, dp_rank: int = 0, dp_size: int = 1) -> None:
        """Raises DataError if an epoch has not enough sequences for a step."""
        sampler.require(global_batch)
        self.sampler, self.global_batch = sampler, global_batch
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.consumed = 0  # sequences, over all ranks
        self.places: list[Place] = []  # where those of this rank's last batch were taken from, in its order

    def next(self) -> tuple[Tensor, Tensor]:
        """(tokens, labels) of the next step, int64 `[global_batch / dp_size, S]` each: this rank's part."""
        self.places = self.sampler.places(*share(self.consumed, self.global_batch, self.dp_rank, self.dp_size))
        batch = inputs_and_labels(self.sampler.read(self.places))
        self.consumed += self.global_batch
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The place, and what it is a place in; plain numbers and strings, the same on every rank."""
        return {
            "consumed": self.consumed,
            "counts": self.sampler.counts(self.consumed),
            "seed": self.sampler.seed,
            "sequence_length": self.sampler.sequence_length,
            "sources": [part.fingerprint for part in self.sampler.parts],
            "fingerprint": self.sampler.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken. Raises DataError, changing nothing, if the data, their blend, the seed or
        the sequence length are others: the place would mean other tokens."""
        sampler = self.sampler
        try:
            consumed, counts = int(state["consumed"]), [int(count) for count in state["counts"]]
            sources, mark = list(state["sources"]), state["fingerprint"]
            seed, length = int(state["seed"]), int(state["sequence_length"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"the checkpoint's place in the data is malformed ({error!r}); use another checkpoint"
            ) from error
        for key, now, then in (
            ("train.seed", sampler.seed, seed),
            ("data.sequence_length", sampler.sequence_length, length),
        ):
            if now != then:
                raise DataError(f"{key} = {now}: the checkpoint's place in the data was reached with {then}; {_REMEDY}")
        if len(sources) != len(sampler.parts):
            raise DataError(
                f"data.blend: {len(sampler.parts)} sources, but the checkpoint's place is in {len(sources)}; {_REMEDY}"
            )
        for part, source in zip(sampler.parts, sources, strict=True):
            if part.fingerprint != source:
                raise DataError(
                    f"{part.key} = {part.source}: its tokens are not those that the checkpoint was trained on; "
                    f"{_REMEDY}"
                )
        if sampler.fingerprint != mark:
            raise DataError(f"data.blend: the weights are not those of the checkpoint; {_REMEDY}")
        if consumed < 0 or sum(counts) != consumed or len(counts) != len(sources):
            raise DataError("the checkpoint's place in the data is malformed; use another checkpoint")
        sampler.resume(counts)
        self.consumed = consumed


_REMEDY = "set it back, or start anew from the checkpoint's weights alone (train.init_from)"
