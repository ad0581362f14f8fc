"""A model of one's own: GPT-J's parallel blocks from plain torch.nn modules. Copy this file to start your own.

`model.name: slimpipe.models.example:ParallelBlocks` in a YAML file trains it. Everything a model must keep to stands in
`slimpipe.models.contract`; slices, pipeline stages and key-value memory are behind `slice.attend`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slimpipe.config import Config
from slimpipe.kernels.rope import inverse_frequencies, rope, rope_table
from slimpipe.models.contract import Slice
from slimpipe.models.layers import recomputed


class Block(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x)): one norm, both branches side by side."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        model = config.model
        self.layer, self.model, self.lean = layer, model, config.memory.recompute == "mlp"
        self.norm = nn.LayerNorm(model.hidden_size)
        self.qkv = nn.Linear(model.hidden_size, (model.heads + 2 * model.kv_heads) * model.head_dim)
        self.out = nn.Linear(model.heads * model.head_dim, model.hidden_size, bias=False)
        self.up = nn.Linear(model.hidden_size, model.intermediate_size)
        self.down = nn.Linear(model.intermediate_size, model.hidden_size)

    def forward(self, x: Tensor, slice: Slice) -> Tensor:
        model, y = self.model, self.norm(x)
        q, k, v = (
            self.qkv(y).unflatten(-1, (-1, model.head_dim)).split((model.heads, model.kv_heads, model.kv_heads), 2)
        )
        frequencies = inverse_frequencies(model.head_dim, model.rope_theta, None, x.device)
        cos, sin = slice.memo("rope", lambda: rope_table(slice.positions, frequencies))
        attention = self.out(slice.attend(self.layer, rope(q, cos, sin), rope(k, cos, sin), v).flatten(2))
        return x + attention + (recomputed(self.feed_forward, y) if self.lean else self.feed_forward(y))

    def feed_forward(self, y: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(y)))


class Head(nn.Module):
    """The final norm; `weight` is the output projection, which the loss multiplies with."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class ParallelBlocks(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.model.vocab_size, config.model.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.model.layers))
        self.head = Head(config.model.vocab_size, config.model.hidden_size)

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Biases zero, norm weights one, matrices normal; `generator` depends on the name, not on the layout."""
        if parameter.dim() == 1:
            parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
        else:
            parameter.normal_(0.0, 0.02, generator=generator)
