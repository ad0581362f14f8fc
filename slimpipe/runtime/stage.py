"""One rank's part of the model: its chunks, given memory and first values."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from slimpipe.kernels.cross_entropy import Loss, linear_cross_entropy, linear_token_losses
from slimpipe.models.contract import Slice, initialise
from slimpipe.runtime.recompute import run_block
from slimpipe.schedule import Shape

if TYPE_CHECKING:
    from slimpipe.config import Recompute


class StageSlice(Slice, Protocol):
    """A block's slice, and what the stage tells it around each block."""

    def enter_layer(self, layer: int) -> None: ...

    def leave_layer(self, layer: int, x: Tensor) -> None: ...


@dataclass
class Stage:
    """One chunk: contiguous layers; the head behind the last stage's, the embedding in front of the first's.

    With vocabulary parallelism no stage has an `embedding`, and the head is its norm: the two weights are
    `slimpipe.runtime.vocabulary.Shards`.
    """

    layers: range
    first: bool
    last: bool
    blocks: list[nn.Module]
    embedding: nn.Module | None
    head: nn.Module | None
    parameters: dict[str, nn.Parameter]
    """By layout-free name: the name in the whole model."""
    recompute: Recompute = "none"

    def forward(self, x: Tensor, slice: StageSlice) -> Tensor:
        """Tokens [b, s] in a stage with an embedding, else x [b, s, H] -> x [b, s, H], in the last stage the head's."""
        if self.embedding is not None:
            x = self.embedding(x)
        for index, layer in enumerate(self.layers):
            slice.enter_layer(layer)
            x = self.run_block(index, x, slice)
            slice.leave_layer(layer, x)
        return x if self.head is None else self.head(x)

    def run_block(self, index: int, x: Tensor, slice: StageSlice) -> Tensor:
        """The stage's block `index`, keeping for its backward what `memory.recompute` says."""
        return run_block(self.blocks[index], x, slice, self.recompute)

    def loss(self, hidden: Tensor, labels: Tensor, scale: Tensor, chunk: int, loss: Loss) -> Tensor:
        """scale * sum of the losses over valid labels [b, s]; the last stage only, with the whole output layer. []"""
        assert self.head is not None
        weight: Tensor = self.head.weight  # type: ignore[assignment]
        return linear_cross_entropy(hidden, weight, labels, scale, chunk, loss)

    def token_losses(self, hidden: Tensor, labels: Tensor, chunk: int, loss: Loss) -> Tensor:
        """The loss of every token [b, s], without gradients; where `loss` can be called."""
        assert self.head is not None
        weight: Tensor = self.head.weight  # type: ignore[assignment]
        return linear_token_losses(hidden, weight, labels, chunk, loss)


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Layout-free name of every parameter of the whole model; a tied weight goes by its first name."""
    return {parameter: name for name, parameter in model.named_parameters()}


def build_stages(
    model: nn.Module,
    placement: Sequence[range],
    shape: Shape,
    rank: int,
    *,
    std: float,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    vocabulary: bool = False,
    recompute: Recompute = "none",
) -> list[Stage]:
    """This rank's chunks, cut out of `model` (on the meta device), with memory and first values.

    With `vocabulary` the weights of embedding and output layer are left out: `build_shards` makes them.

    `placement[g]` are stage g's layers. A parameter's first values depend on `seed` and its name alone, so they are
    the same in every layout (on one kind of device). A weight tied between first and last stage exists on both ranks,
    with the same values; on one rank it is one parameter.
    """
    names = parameter_names(model)
    made: dict[nn.Parameter, nn.Parameter] = {}
    embedding_weight, output_weight = model.embedding.weight, model.head.weight  # type: ignore[union-attr]

    def give_memory(module: nn.Module | None) -> dict[str, nn.Parameter]:
        if module is None:
            return {}
        found = {}
        for owner in module.modules():
            for key, meta in owner.named_parameters(recurse=False):
                if vocabulary and (meta is embedding_weight or meta is output_weight):
                    continue
                if meta not in made:
                    made[meta] = nn.Parameter(torch.empty(meta.shape, dtype=dtype, device=device))
                    initialise(model, names[meta], made[meta].data, std, generator(seed, names[meta], device))
                owner.register_parameter(key, made[meta])
                found[names[meta]] = made[meta]
        return found

    stages = []
    for chunk in range(shape.v):
        index = shape.stage(rank, chunk)
        layers = placement[index]
        first, last = index == 0, index == shape.stages - 1
        embedding = model.embedding if first and not vocabulary else None
        head = model.head if last else None
        blocks = [model.layers[layer] for layer in layers]  # type: ignore[index]
        parameters: dict[str, nn.Parameter] = {}
        for module in (embedding, *blocks, head):
            parameters |= give_memory(module)  # type: ignore[arg-type]
        stages.append(Stage(layers, first, last, blocks, embedding, head, parameters, recompute))  # type: ignore[arg-type]
    return stages


def generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    """Random numbers of one parameter: they depend on the run's seed and the parameter's name alone."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))
