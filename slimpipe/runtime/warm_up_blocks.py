"""Runs a rank's blocks once before the first step, each of them: a chunk's may differ.

Dense and MoE blocks by turns, other heads, a model of one's own that looks at its layer's index: what a block runs is
not to be told from outside. So every block runs, over the first slice and over one with a past. That is enough for all
but attention, as slices have equally many tokens; and what attention runs depends on the shapes it is given and on its
past alone. So the first block of each kind (by class, parameters and shapes of its attention) runs over a whole
sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from slimpipe.runtime.engine import Engine
from slimpipe.runtime.kv_slots import SlicePlace
from slimpipe.runtime.slice_context import AttentionShapes


@dataclass(frozen=True)
class Inputs:
    """What a block is given, [b, s, H]: noise, or zeros, which take no random numbers."""

    micro_batch: int
    hidden: int
    dtype: torch.dtype
    device: torch.device
    noise: bool = True

    def slice(self, tokens: int) -> Tensor:
        make = torch.randn if self.noise else torch.zeros
        return make(self.micro_batch, tokens, self.hidden, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class _Run:
    """`kept`: bytes that the forward has left allocated, its output among them."""

    out: Tensor
    kept: int
    attended: AttentionShapes | None


class Blocks:
    """Of one rank. The making of it has every block take the memory of its KV slots, over one slice.

    Raises ValueError where a block returns another kind of tensor than it was given or attends as another layer, or
    where the exchange is to lend between blocks that attend in different shapes.
    """

    def __init__(self, engine: Engine, inputs: Inputs) -> None:
        self._engine, self._inputs = engine, inputs
        self._whole = [
            (index, SlicePlace(index, ((0, index),) if index else (), last=index == engine.shape.n - 1))
            for index in range(engine.shape.n)
        ]
        self._few = self._whole
        if engine.shape.n > 2:
            # The last slice with a past of one: no other slot has been written, and it takes no longer.
            self._few = [self._whole[0], (engine.shape.n - 1, SlicePlace(1, ((0, 1),), last=True))]
        self.attention: dict[tuple[int, AttentionShapes], int] = {}
        """By chunk and shapes, the first layer that attends in these."""
        self._kinds: list[list[Hashable]] = [[] for _ in engine.stages]
        for chunk, index in self._all():
            layer = engine.stages[chunk].layers[index]
            if inputs.device.type == "cuda":
                # Slots stay: cut out of what the last block has left, they would leave pieces that nothing fits into.
                torch.cuda.empty_cache()
            found = self._forward(chunk, index, *self._whole[0]).attended
            if found is not None:
                self.attention.setdefault((chunk, found), layer)
            if engine.loans is not None:
                first = next((shapes for _, shapes in self.attention), None)
                _refuse_unlike(engine.loans.plan.mode, layer, found, first)
            self._kinds[chunk].append((_make(engine.stages[chunk].blocks[index]), found))

    def run(self) -> int:
        """Forwards and, where gradients are recorded, backwards, of each block by itself.

        Returns the bytes that one unit keeps for its backward in the largest chunk (0 on the CPU, where they are not
        counted)."""
        met: set[tuple[int, Hashable]] = set()
        units = [0] * len(self._kinds)
        for chunk, index in self._all():
            kind = chunk, self._kinds[chunk][index]
            units[chunk] += self._sequence(chunk, index, self._few if kind in met else self._whole)
            met.add(kind)
        return max(units)

    def run_as_swapped(self) -> None:
        """The same where what a forward saves goes to the host: by `as_swapped`."""
        for chunk, index in self._all():
            self._sequence(chunk, index, self._few, as_swapped)

    def _all(self) -> Iterator[tuple[int, int]]:
        for chunk, stage in enumerate(self._engine.stages):
            for index, layer in enumerate(stage.layers):
                self._engine.progress.now(f"warming up layer {layer}")
                yield chunk, index

    def _sequence(
        self,
        chunk: int,
        index: int,
        slices: Sequence[tuple[int, SlicePlace]],
        saving: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> int:
        """One block over slices of a sequence, `saving` around each forward. The most bytes that it keeps of one."""
        graphs, most = [], 0
        for number, place in slices:
            with saving():
                run = self._forward(chunk, index, number, place)
            most = max(most, run.kept)
            if run.out.requires_grad:
                graphs.append((get_gradient_edge(run.out), torch.randn_like(run.out)))
            del run
        while graphs:
            edge, gradient = graphs.pop()
            torch.autograd.backward((edge,), (gradient,))
        return most

    def _forward(self, chunk: int, index: int, number: int, place: SlicePlace) -> _Run:
        """Of slice `number` at `place`."""
        engine, stage = self._engine, self._engine.stages[chunk]
        context = engine.context(chunk, number, place, self._inputs.device)
        x = self._inputs.slice(engine.slice_tokens).requires_grad_(torch.is_grad_enabled())
        before = _allocated(x.device)
        layer = stage.layers[index]
        out = stage.run_block(index, x, context)
        refuse_other(f"layer {layer}", out, x)
        _refuse_foreign(layer, context.attended)
        # The output takes the place of the next block's input, so it counts once a layer.
        return _Run(out, _allocated(x.device) - before, context.attended.get(layer))


@contextmanager
def as_swapped() -> Iterator[None]:
    """Around a forward: its backward is given what a swap gives back, tensors that record no gradient. The compiler has
    other code for these."""
    with saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor):
        yield


def refuse_other(part: str, out: Tensor, expected: Tensor) -> None:
    """Stages send each other tensors of one shape and dtype, and what is received is taken to be that."""
    if (out.shape, out.dtype) != (expected.shape, expected.dtype):
        found, wanted = (f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in (out, expected))
        raise ValueError(
            f"model.name: {part} returns {found} where {wanted} is needed; see slimpipe/models/contract.py"
        )


def _refuse_foreign(layer: int, attended: Iterable[int]) -> None:
    """A block that attends as another would read and write that one's keys."""
    for other in attended:
        if other != layer:
            raise ValueError(
                f"model.name: the block of layer {layer} calls slice.attend(layer={other}); pass the block's own index"
            )


def _make(block: nn.Module) -> Hashable:
    """What a block is made of: modules by class, parameters by shape."""
    modules = tuple((name, type(module)) for name, module in block.named_modules())
    return modules, tuple((name, parameter.shape, parameter.dtype) for name, parameter in block.named_parameters())


def _refuse_unlike(mode: str, layer: int, found: AttentionShapes | None, first: AttentionShapes | None) -> None:
    if found is None:
        raise ValueError(f"pipeline.exchange = {mode}: layer {layer} did not call slice.attend; set it to off")
    if not found.alike:
        raise ValueError(
            f"pipeline.exchange = {mode}: layer {layer} attends with {found}; give slice.attend v in the shape of k "
            "and all three in one dtype, or set it to off"
        )
    if found != first:
        raise ValueError(
            f"pipeline.exchange = {mode}: layer {layer} attends in other shapes or dtypes than layers before it; set "
            "it to off"
        )


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
