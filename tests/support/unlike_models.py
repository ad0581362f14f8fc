"""A model whose blocks are not alike: nothing but running one tells what it runs."""

from __future__ import annotations

from torch import Tensor, nn

from slimpipe.config import Config
from slimpipe.kernels.fuse import fused
from slimpipe.models.contract import Slice
from slimpipe.models.llama import Block, Llama


@fused
def of_odd_layers(x: Tensor) -> Tensor:
    return x.sin() + 0.5


@fused
def of_another_class(x: Tensor) -> Tensor:
    return x.cos() - 0.5


class ByIndex(Block):
    """Odd layers run a function of their own."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__(config, layer)
        self.index = layer

    def forward(self, x: Tensor, slice: Slice) -> Tensor:
        out = super().forward(x, slice)
        return of_odd_layers(out) if self.index % 2 else out


class OtherHeads(Block):
    """Keys and values of one head."""

    def __init__(self, config: Config, layer: int) -> None:
        settings = config.model.model_copy(update={"kv_heads": 1})
        super().__init__(config.model_copy(update={"model": settings}), layer)

    def forward(self, x: Tensor, slice: Slice) -> Tensor:
        return of_another_class(super().forward(x, slice))


class Unlike(Llama):
    """Blocks by turns: plain in even layers, by index in odd ones; every third has other heads. No chunk's first block
    tells of the others."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(
            OtherHeads(config, layer) if layer % 3 == 2 else ByIndex(config, layer)
            for layer in range(config.model.layers)
        )


class Skipping(Block):
    """Without its attention."""

    def forward(self, x: Tensor, slice: Slice) -> Tensor:
        return x + self.mlp(x, self.mlp_norm, slice.again)


class Sparse(Llama):
    """Attention in odd layers only: in no chunk's first one, where chunks have two."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(
            Block(config, layer) if layer % 2 else Skipping(config, layer) for layer in range(config.model.layers)
        )
