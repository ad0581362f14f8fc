"""Models of a user's own that go wrong: at a named place in the middle of training, or by breaking the contract."""

from __future__ import annotations

import os
import signal
import time

from torch import Tensor, nn

from slimpipe.config import Config
from slimpipe.models.contract import Slice
from slimpipe.models.llama import Block, Llama

MISBEHAVIOUR = "SLIMPIPE_TEST_MISBEHAVIOUR"
"""`raise 6 2 3`: in layer 6 at its third visit to slice 2, raise. Also `die`: SIGKILL itself; `sleep`: for ever; and
`poison`: give NaN, that once."""


class Misbehaving(Llama):
    """Llama, but for what the environment's `MISBEHAVIOUR` says."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(MisbehavingBlock(config, layer) for layer in range(config.model.layers))


class MisbehavingBlock(Block):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__(config, layer)
        what, *where = os.environ[MISBEHAVIOUR].split()
        at_layer, self.slice, self.visits = map(int, where)
        self.what = what if at_layer == layer else None
        self.slice_tokens = config.data.sequence_length // config.pipeline.slices

    def forward(self, x: Tensor, slice: Slice) -> Tensor:
        if self.what is not None and int(slice.positions[0]) == self.slice * self.slice_tokens:
            self.visits -= 1
            if self.visits == 0:
                if self.what == "poison":
                    return super().forward(x, slice) * float("nan")
                misbehave(self.what)
        return super().forward(x, slice)


def misbehave(what: str) -> None:
    """In the first attempt; restarted by torchrun, it behaves."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return
    if what == "raise":
        raise ArithmeticError("this block has had enough")
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        time.sleep(1)


class WithoutHead(Llama):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        del self.head


class WithoutOutputWeight(Llama):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.head = nn.LayerNorm(config.model.hidden_size, elementwise_affine=False)


class WithAnotherVocabulary(Llama):
    """Trained without a word, with a loss that means nothing, before shapes were checked."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.head.weight = nn.Parameter(self.head.weight.new_empty(7, config.model.hidden_size))


class WithABuffer(Llama):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.register_buffer("scale", Tensor([1.0]))


class WithAWideBlock(Llama):
    """Sent on, its output ended the next stage's process without a word."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.layers[1].register_forward_hook(lambda module, inputs, out: out.double())


class WithAShortBlock(Llama):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.layers[1].register_forward_hook(lambda module, inputs, out: out[:, 1:])


class WithAWideEmbedding(Llama):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.embedding.register_forward_hook(lambda module, inputs, out: out.double())


class WithAWideHead(Llama):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.head.register_forward_hook(lambda module, inputs, out: out.double())


class WithoutASlice(Llama):
    """Its third block is plain PyTorch's."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.layers[2] = nn.Linear(config.model.hidden_size, config.model.hidden_size)


class OfOneIndex(Llama):
    """Every block takes itself for the first."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(Block(config, 0) for _ in range(config.model.layers))


class WithAFrozenWeight(Llama):
    """Was trained as a whole without a word."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.embedding.weight.requires_grad_(False)


class OneLayerShort(Llama):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.layers = self.layers[:-1]


class WithDropout(Llama):
    """Draws random numbers in every forward."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(DroppingBlock(config, layer) for layer in range(config.model.layers))


class DroppingBlock(Block):
    def forward(self, x: Tensor, slice: Slice) -> Tensor:
        return nn.functional.dropout(super().forward(x, slice), 0.1)
