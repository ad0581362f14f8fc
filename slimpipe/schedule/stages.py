"""Which layers each stage holds. Stage g = c p + r is chunk c of rank r (plan.Shape)."""

from __future__ import annotations

from collections.abc import Sequence

from slimpipe.schedule.plan import PlanError


def place_layers(layers: int, stages: int, explicit: Sequence[int] | None = None) -> tuple[range, ...]:
    """Layer indices of each stage: contiguous, in order, every stage at least one.

    `explicit` gives the layers a stage. Otherwise they are spread evenly and the earliest stages take the remainder,
    which is never as long as the pipeline: the last stage, which has the output layer to carry too, takes none of it.
    Raises PlanError naming `model.layers` or `pipeline.layers_per_stage`.
    """
    if layers < stages:
        raise PlanError(
            f"model.layers = {layers}: fewer than the {stages} stages (parallel.pp x pipeline.virtual_stages); "
            f"use at most {layers} stages"
        )
    if explicit is None:
        each, extra = divmod(layers, stages)
        counts = [each + 1] * extra + [each] * (stages - extra)
    else:
        counts = list(explicit)
        _validate(layers, stages, counts)
    firsts = [sum(counts[:stage]) for stage in range(stages)]
    return tuple(range(first, first + count) for first, count in zip(firsts, counts, strict=True))


def _validate(layers: int, stages: int, counts: Sequence[int]) -> None:
    where = f"pipeline.layers_per_stage = {list(counts)}"
    if len(counts) != stages:
        raise PlanError(
            f"{where}: {len(counts)} entries for {stages} stages (parallel.pp x pipeline.virtual_stages); "
            f"give {stages}, stage by stage"
        )
    for stage, count in enumerate(counts):
        if count < 1:
            raise PlanError(f"{where}: stage {stage} has {count} layers; each needs at least 1")
    if sum(counts) != layers:
        raise PlanError(f"{where}: adds up to {sum(counts)}, but model.layers = {layers}")
