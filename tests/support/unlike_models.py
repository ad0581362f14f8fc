"""A model whose blocks are not alike: nothing but running one tells what it runs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slimpipe.config import Config
from slimpipe.kernels.fuse import fused
from slimpipe.models.contract import Slice
from slimpipe.models.layers import Linear, RMSNorm
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


class HalfHeads(Llama):
    """The second half of the layers has keys and values of one head."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        layers = config.model.layers
        self.layers = nn.ModuleList(
            OtherHeads(config, layer) if layer >= layers // 2 else Block(config, layer) for layer in range(layers)
        )


class Unequal(nn.Module):
    """Attention alone. `model.options`: dtypes of q, k and v, by layer in turn (`dtypes`), and the width of v's heads
    (`width`)."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        model = config.model
        self.layer, width = layer, model.options.get("width", model.head_dim)
        dtypes = model.options["dtypes"]
        self.dtypes = [getattr(torch, name) for name in dtypes[layer % len(dtypes)]]
        self.norm = RMSNorm(model.hidden_size, model.norm_eps)
        self.parts = nn.ModuleList(
            Linear(model.hidden_size, size)
            for size in (model.heads * model.head_dim, model.kv_heads * model.head_dim, model.kv_heads * width)
        )
        self.heads = (model.heads, model.kv_heads, model.kv_heads)
        self.output = Linear(model.heads * width, model.hidden_size)

    def forward(self, x: Tensor, slice: Slice) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            part(y).unflatten(-1, (heads, -1)).to(dtype)
            for part, heads, dtype in zip(self.parts, self.heads, self.dtypes, strict=True)
        )
        return x + self.output(slice.attend(self.layer, q, k, v).flatten(2).to(x.dtype))


class UnequalLayers(Llama):
    """Queries, keys and values that are not alike."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(Unequal(config, layer) for layer in range(config.model.layers))
