"""What is shown before the first step: layout, placement, memory predicted by term, and the schedule's numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, get_args

from slimpipe.config import Recompute
from slimpipe.kernels.attention import select_backend
from slimpipe.plan.footprint import Footprint
from slimpipe.schedule import assign_kv_slots, bubble_fraction
from slimpipe.train.attention import is_measured
from slimpipe.train.dtypes import DTYPES
from slimpipe.train.forecast import ROOM, Forecast

_MOST_RANKS: Final = 16
"""Rows of a table by rank; of more ranks, the first and last few and the fullest."""


def describe(run: Forecast) -> str:
    """The lines, joined."""
    return "\n".join([*_layout(run), *_by_rank(run), *_fit(run), *_swap(run), *_schedule(run)])


def _layout(run: Forecast) -> Iterator[str]:
    config, shape = run.config, run.config.shape
    attention = "the fastest of what is there"
    if not is_measured(config, run.device):
        dtype = DTYPES[config.train.dtype]
        attention = select_backend(config.train.attention, run.device, dtype, config.train.deterministic).name
    counts = [len(layers) for layers in run.placement]
    uneven = "" if len(set(counts)) == 1 else " (uneven: the layers do not divide by the stages, or so it is set)"
    loans = "" if run.planned.exchange is None else f", {len(run.planned.exchange.loans):,} loans a step"
    whole = sum(p.numel() for p in run.model.parameters())
    yield (
        f"slimpipe: {config.pipeline.schedule}, pp {shape.p}, virtual stages {shape.v}, slices {shape.n}, "
        f"microbatches {shape.m}; {run.device.type}, {config.train.dtype}, attention {attention}"
    )
    yield f"layers by stage: {counts}{uneven}"
    yield (
        f"vocabulary {'over all ranks' if config.vocab_parallel else 'whole'}, {run.chunk:,} tokens a chunk; "
        f"exchange {config.pipeline.exchange}{loans}; recompute {config.memory.recompute}; "
        f"swap {config.memory.swap}"
    )
    yield (
        f"tokens a step: {config.train.global_batch * config.data.sequence_length:,}, "
        f"{config.data.sequence_length // shape.n:,} a slice; parameters: {whole:,}"
    )


def _by_rank(run: Forecast) -> Iterator[str]:
    """Placement and memory, a rank a row; terms that are nought everywhere are left out."""
    footprints = run.memory
    shown = [term for term in footprints[0].terms if any(footprint.terms[term] for footprint in footprints)]
    largest = max(footprint.total for footprint in footprints)
    size, unit = (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")
    head = ["rank", "holds", *shown, "total"]
    rows = []
    for rank in _ranks(run):
        footprint = footprints[rank]
        numbers = [f"{bytes / size:.2f}" for bytes in (*(footprint.terms[term] for term in shown), footprint.total)]
        rows.append([str(rank), _holds(run, rank), *numbers])
    yield f"memory by rank as predicted, in {unit}:"
    yield from table(head, rows)


def _ranks(run: Forecast) -> Sequence[int]:
    p = run.config.shape.p
    if p <= _MOST_RANKS:
        return range(p)
    fullest = max(range(p), key=lambda rank: run.memory[rank].total)
    return sorted({*range(_MOST_RANKS // 2), fullest, *range(p - _MOST_RANKS // 2 + 1, p)})


def _holds(run: Forecast, rank: int) -> str:
    """`embedding, 0-3, 8-11`: of its chunks in turn."""
    shape = run.config.shape
    stages = [shape.stage(rank, chunk) for chunk in range(shape.v)]
    parts = [
        f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])
        for layers in (run.placement[stage] for stage in stages)
    ]
    if run.config.vocab_parallel:
        parts.append("vocabulary's part")
    else:
        parts = [*(["embedding"] if 0 in stages else []), *parts, *(["head"] if shape.stages - 1 in stages else [])]
    return ", ".join(parts)


def _fit(run: Forecast) -> Iterator[str]:
    if run.device_bytes is None:
        return
    rank, worst = max(enumerate(run.memory), key=lambda found: found[1].total)
    gib, share = 2.0**30, worst.total / run.device_bytes
    have = f"memory of the device: {run.device_bytes / gib:.1f} GiB; rank {rank} is predicted to use {share:.0%}"
    if share <= 1 - ROOM:
        yield have
    else:
        verdict = "does not fit" if share > 1 else "hardly fits"
        yield f"warning: {have}, which {verdict}. {remedy(run, worst)}"


def _swap(run: Forecast) -> Iterator[str]:
    """What will move, on the ranks that move the most."""
    config, planned = run.config, run.planned
    yield from _keys(run)
    if config.memory.swap == "off":
        return
    if planned.swap is None or not any(planned.swap.trips):
        why = "no budget on a CPU: set memory.gpu_budget_gib" if planned.swap is None else "everything fits"
        yield f"swap: nothing moves ({why})" if planned.kv is None else f"swap: no activations move ({why})"
        return
    swap, units = planned.swap, config.shape.units
    moved = [swap.moved(rank) for rank in range(config.shape.p)]
    rank = max(range(len(moved)), key=lambda rank: moved[rank])
    host = planned.host_bytes(rank) - planned.kv_bytes(rank)
    size, unit = _unit_for(moved[rank])
    yield (
        f"swap: rank {rank} moves the most: {len(swap.trips[rank])} of {units} units a step, {moved[rank] / size:.2f} "
        f"{unit} out and back; {host / size:.2f} {unit} of host memory; waits {max(planned.swap_waits):.3f} s on paper"
    )
    if not swap.fits:
        over = max(stated - wanted for stated, wanted in zip(swap.budget, swap.wanted, strict=True))
        yield (
            f"warning: swap: all that can be moved leaves {over / 2**30:.2f} GiB above the budget. "
            "Raise pipeline.slices, or choose more memory.recompute"
        )


def _keys(run: Forecast) -> Iterator[str]:
    """Keys and values that stream, on the rank with most of them."""
    planned, shape = run.planned, run.config.shape
    if planned.kv is None:
        return
    streaming = [rank for rank in range(shape.p) if planned.kv.ranks[rank]]
    which = "all ranks" if len(streaming) == shape.p else f"ranks {', '.join(map(str, streaming))}"
    rank = max(streaming, key=planned.kv_bytes)
    host = planned.kv_bytes(rank)
    device = sum(run.memory[rank].terms[term] for term in ("KV slots", "dK, dV"))
    out, back = planned.kv.moved(planned.plan, rank, assign_kv_slots(shape, planned.plan.compute(rank)))
    size, unit = _unit_for(host)
    yield (
        f"keys and values: in host memory, by layer, on {which}; rank {rank} has the most: {host / size:.2f} {unit} "
        f"there, {device / size:.2f} {unit} on the device; {out / size:.2f} {unit} out and {back / size:.2f} {unit} "
        f"back a step; waits {max(planned.kv_waits):.3f} s on paper"
    )


def _unit_for(size: int) -> tuple[int, str]:
    return (2**30, "GiB") if size >= 2**30 else (2**20, "MiB")


def remedy(run: Forecast, footprint: Footprint) -> str:
    """What to change, most of all; where activations are the most, the next mode of recomputation first, then swap."""
    largest = max(footprint.terms, key=lambda term: footprint.terms[term])
    modes: tuple[str, ...] = get_args(Recompute)
    next_mode = modes.index(run.config.memory.recompute) + 1
    ways = [f"memory.recompute: {modes[next_mode]}"] if next_mode < len(modes) else []
    ways += ["memory.swap: auto"] if run.config.memory.swap == "off" else []
    if largest == "activations" and ways:
        return f"activations take the most: set {' or '.join(ways)}, or raise pipeline.slices or parallel.pp"
    return footprint.remedy


def _schedule(run: Forecast) -> Iterator[str]:
    shape, peaks = run.config.shape, run.planned.peaks
    equal = float(bubble_fraction(run.config.pipeline.schedule, shape))
    simulated = ""
    if run.timeline is not None:
        simulated = f"{run.timeline.bubble_fraction:.1%} by operations, simulated with free transfers; "
    units = by_rank([str(count) for count in peaks.units])
    slots = by_rank([" + ".join(map(str, chunks)) for chunks in peaks.kv_slots])
    yield f"schedule: idle {simulated}{equal:.1%} if slices were equal; {shape.units * shape.p:,} units a step"
    yield f"schedule: units in flight by rank {units}; KV slots by rank and chunk {slots}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines in columns, numbers to the right; behind a jump in the ranks a line of dots."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        parts = (
            cell.ljust(width) if place == 1 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  " + "  ".join(parts).rstrip()

    lines = [line(head)]
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and int(row[0]) != int(before[0]) + 1:
            lines.append("  " + "...".rjust(widths[0]))
        lines.append(line(row))
    return lines


def by_rank(values: Sequence[str]) -> str:
    """`6, 4`; of many ranks the first and the last two, for they change steadily in between."""
    return ", ".join(values if len(values) <= _MOST_RANKS else [*values[:2], "...", *values[-2:]])
