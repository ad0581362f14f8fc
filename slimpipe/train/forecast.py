"""A run before it starts: who holds what, how much memory it takes, how its step goes on paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from slimpipe.kernels import fuse
from slimpipe.kernels.attention import expected_backend, joins_past
from slimpipe.kernels.attention.pieces import scratch_bytes
from slimpipe.models.contract import build_model
from slimpipe.plan.footprint import Footprint, Footprints
from slimpipe.plan.memory import output_chunk
from slimpipe.schedule import Shape, Timeline, place_layers
from slimpipe.train.dtypes import DTYPES
from slimpipe.train.planning import Planned, on_paper
from slimpipe.train.rings import near_by_settings, rings_by_rank

if TYPE_CHECKING:
    from slimpipe.config import Config

ROOM: Final = 0.05
"""Of a device's memory, left for its context, NCCL's buffers, and what the allocator cannot use."""


@dataclass(frozen=True)
class Forecast:
    """A run before it starts. `device`: of this process. `assumed_bytes`: of the memory of a GPU that is not here."""

    config: Config
    planned: Planned
    device: torch.device
    assumed_bytes: int | None = None

    @cached_property
    def placement(self) -> tuple[range, ...]:
        config = self.config
        return place_layers(config.model.layers, config.shape.stages, config.pipeline.layers_per_stage)

    @cached_property
    def model(self) -> nn.Module:
        """On the meta device."""
        return build_model(self.config)

    @cached_property
    def parameters(self) -> list[int]:
        """Numbers that each rank trains."""
        return rank_parameters(self.model, self.placement, self.config.shape, self.config.vocab_parallel)

    @cached_property
    def device_bytes(self) -> int | None:
        """Of the device's memory; None for the CPU, whose ranks share the machine's with all else."""
        if self.assumed_bytes is not None or self.device.type != "cuda":
            return self.assumed_bytes
        total: int = torch.cuda.get_device_properties(self.device).total_memory
        return total

    @cached_property
    def chunk(self) -> int:
        """Tokens a chunk of the output layer, as it will be chosen when weights and gradients have their memory."""
        if self.device_bytes is None:
            return output_chunk(self.config, None)
        element = DTYPES[self.config.train.dtype].itemsize
        return output_chunk(self.config, self.device_bytes - max(self.parameters) * (element + 4))

    @cached_property
    def memory(self) -> tuple[Footprint, ...]:
        """By rank."""
        fused = self.assumed_bytes is not None or fuse.is_available(self.device)
        train = self.config.train
        device = "cuda" if self.assumed_bytes is not None else self.device.type
        near = near_by_settings(self.config, on_gpus=device == "cuda")
        backend = expected_backend(train.attention, device, train.dtype == "bfloat16", train.deterministic)
        return footprints(
            self.config, self.planned, self.placement, self.parameters, self.chunk, fused, near, backend
        ).ranks

    @cached_property
    def timeline(self) -> Timeline | None:
        return on_paper(self.config, self.planned)

    @property
    def work(self) -> tuple[float, ...]:
        """Each rank's compute in a step, in forwards of a unit: by the simulator, else by its layers."""
        if self.timeline is not None:
            return tuple(self.timeline.makespan - idle for idle in self.timeline.idle)
        shape = self.config.shape
        return tuple(
            float(sum(len(self.placement[shape.stage(rank, chunk)]) for chunk in range(shape.v)))
            for rank in range(shape.p)
        )


def footprints(
    config: Config,
    planned: Planned,
    placement: Sequence[range],
    parameters: Sequence[int],
    chunk: int,
    fused: bool,
    near: Sequence[Sequence[int]],
    backend: str,
) -> Footprints:
    """Of every rank. Arguments as `Footprints` has them; `chunk`: tokens a chunk of the output layer; `backend`: of
    attention, by name."""
    model, batch = config.model, config.train.micro_batch
    element = DTYPES[config.train.dtype].itemsize

    def scratch(queries: int, keys: int, joined: int) -> int:
        sizes = model.heads, model.kv_heads, model.head_dim
        return scratch_bytes(backend, queries, keys, *sizes, element, batch, config.train.deterministic, joined)

    return Footprints(
        config,
        planned.plan,
        planned.peaks,
        planned.exchange,
        placement,
        parameters,
        chunk,
        planned.send_window,
        fused=fused,
        near=near,
        rings=rings_by_rank(config, planned, near),
        swap=planned.swap,
        kv=planned.kv,
        attention_scratch=scratch,
        joins=joins_past(backend),
    )


def rank_parameters(model: nn.Module, placement: Sequence[range], shape: Shape, vocabulary: bool) -> list[int]:
    """Numbers that each pipeline rank trains; `vocabulary`: the two tables are cut into equal, padded rows."""
    embedding, head = model.embedding, model.head
    layers: Any = model.layers
    tables: set[Any] = {embedding.weight, head.weight}  # type: ignore[union-attr]
    counts = []
    for rank in range(shape.p):
        held: set[nn.Parameter] = set()
        for chunk in range(shape.v):
            stage = shape.stage(rank, chunk)
            ends = [*([embedding] if stage == 0 else []), *([head] if stage == shape.stages - 1 else [])]
            for module in (*(layers[layer] for layer in placement[stage]), *ends):
                held |= set(module.parameters())
        rows = 0
        if vocabulary:
            held -= tables
            rows = sum(-(-table.shape[0] // shape.p) * table.shape[1] for table in tables)
        counts.append(sum(parameter.numel() for parameter in held) + rows)
    return counts
