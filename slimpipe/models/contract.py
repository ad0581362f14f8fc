"""What a model must be to run in the pipeline, and what its blocks are given (docs/your_model.md).

A model is a `torch.nn.Module` built from the whole `Config`, with three attributes:

- `embedding`: a module, tokens [b, s] -> x [b, s, H], with a parameter `weight` [V, H];
- `layers`: a ModuleList of blocks, each `forward(x, slice) -> x`, [b, s, H];
- `head`: a module, x [b, s, H] -> hidden [b, s, H] (the final norm), with a parameter `weight` [V, H], the output
  projection. `head.weight is embedding.weight` ties them.

It is built on the meta device, and each rank gives memory only to its own part; so a block keeps no buffers with values
of its own. What depends on the token's place it takes from the slice: `slice.positions`, `slice.attend`, `slice.memo`.

What a block keeps for its backward is `memory.recompute`'s to say. `all_but_attention` and `full` work for every block:
it runs twice, the second time within its backward, from its input (and, in `all_but_attention`, the outcome of its
attention). A block must therefore do the same each time and change neither its input nor what `attend` gave in place;
random numbers are the same again. `norms` and `mlp` are what the block makes of them: those built from
`slimpipe.models.layers` have them, and `recomputed(part, x)` there lets any part of a block keep its input only.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from slimpipe.config import Config

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Slice(Protocol):
    """What a block sees of the slice it works on."""

    @property
    def positions(self) -> Tensor:
        """Absolute positions of the slice's tokens, [s] int64."""
        ...

    @property
    def again(self) -> bool:
        """Whether the block runs a second time, for its backward alone, and its `forward` is marked by `leaves_out`.

        Neither the k and v that it gives to `attend` are read then, nor its output: a block may leave out what only
        those need. Their gradients come as ever.
        """
        ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention over the whole prefix, this slice included. A block calls it once.

        `layer` is the block's index in the model; q [b, s, heads, d], k and v [b, s, kv_heads, d], after RoPE;
        returns [b, s, heads, d]. Softmax scale 1 / sqrt(d).
        """
        ...

    def memo(self, key: str, make: Callable[[], T]) -> T:
        """make(), once for this slice: later calls with the same key return the same object (RoPE tables, say).

        It must depend on no parameter and no activation, and all blocks must mean the same by one key.
        """
        ...


def leaves_out(forward: F) -> F:
    """Decorator of a block's `forward` that leaves out what `Slice.again` says.

    The mark is the function's: a block that overrides it, or that runs another block as a part of its own, goes on to
    compute with what came out, and so is never told `again` unless marked itself. Nor is one whose `forward` is
    wrapped: `functools.wraps` copies the mark, which says whose it is.
    """
    vars(forward)["leaves_out"] = forward
    return forward


def may_leave_out(block: nn.Module) -> bool:
    """Whether nobody computes with what a second run of `block` gives: its `forward` is marked, and no hook has a look
    at the output."""
    forward = getattr(block.forward, "__func__", block.forward)
    return getattr(forward, "leaves_out", None) is forward and not block._forward_hooks


def initialise(module: nn.Module, name: str, parameter: Tensor, std: float, generator: torch.Generator) -> None:
    """First values of one parameter: the model's own `init_parameter(name, parameter, generator)` if it has one; else
    zeros for biases, ones for other vectors (norm weights), a normal distribution of deviation `std` for the rest."""
    own: Any = getattr(module, "init_parameter", None)
    with torch.no_grad():
        if own is not None:
            own(name, parameter, generator)
        elif parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            parameter.normal_(0.0, std, generator=generator)


def build_model(config: Config) -> nn.Module:
    """The model that `model.name` asks for, on the meta device: no memory, whole on every rank.

    Raises ValueError, naming `model.name`, where it cannot be found or breaks the contract.
    """
    name = config.model.name
    make = _model_class(name)
    if not (isinstance(make, type) and issubclass(make, nn.Module)):
        raise ValueError(f"model.name = {name}: not a class of torch.nn.Module; see slimpipe/models/contract.py")
    with torch.device("meta"):
        model: Any = make(config)
    for attribute in ("embedding", "layers", "head"):
        if not isinstance(getattr(model, attribute, None), nn.Module):
            raise ValueError(
                f"model.name = {name}: the model has no module `{attribute}`; see slimpipe/models/contract.py"
            )
    table = (config.model.vocab_size, config.model.hidden_size)
    for attribute in ("embedding", "head"):
        weight = getattr(getattr(model, attribute), "weight", None)
        if not isinstance(weight, nn.Parameter) or weight.shape != table:
            shape = f"; its shape is {list(weight.shape)}" if isinstance(weight, nn.Parameter) else ""
            raise ValueError(
                f"model.name = {name}: `{attribute}` has no parameter `weight` of shape {list(table)}, [vocab, "
                f"hidden]{shape}"
            )
    for buffer, _ in model.named_buffers():
        raise ValueError(
            f"model.name = {name}: the model has a buffer `{buffer}`, whose values are lost on the meta device; "
            "make it in forward, through slice.memo"
        )
    if not isinstance(model.layers, nn.ModuleList):
        raise ValueError(f"model.name = {name}: `layers` is no torch.nn.ModuleList")
    if len(model.layers) != config.model.layers:
        raise ValueError(
            f"model.layers = {config.model.layers}: {name} built {len(model.layers)} layers; make them agree"
        )
    for layer, block in enumerate(model.layers):
        _refuse_other_call(name, layer, block)
    _refuse_strays(name, model)
    return model


def _refuse_other_call(name: str, layer: int, block: nn.Module) -> None:
    """Blocks are called as `block(x, slice)`."""
    try:
        taken = inspect.signature(block.forward)
    except (TypeError, ValueError):  # of something compiled
        return
    try:
        taken.bind("x", "slice")
    except TypeError as error:
        raise ValueError(
            f"model.name = {name}: layers.{layer} has forward{taken}, which is called as forward(x, slice): {error}"
        ) from error


def _refuse_strays(name: str, model: Any) -> None:
    """Every parameter must belong to one part of the model, but for the tie that the contract knows: what two stages
    share would be two copies with gradients of their own, and what lies outside no stage would hold. None may be
    frozen: stages make parameters of their own, which are all trained."""
    parts = [("embedding", model.embedding), *((f"layers.{i}", block) for i, block in enumerate(model.layers))]
    owner: dict[nn.Parameter, str] = {}
    for part, module in (*parts, ("head", model.head)):
        for parameter in module.parameters():
            first = owner.setdefault(parameter, part)
            tie = parameter is model.embedding.weight and (first, part) == ("embedding", "head")
            if first != part and not tie:
                raise ValueError(
                    f"model.name = {name}: {part} shares a weight with {first}; only head.weight and embedding.weight "
                    "may be one"
                )
    for key, parameter in model.named_parameters():
        if not parameter.requires_grad:
            raise ValueError(
                f"model.name = {name}: parameter {key} requires no gradient, but every weight is trained; leave "
                "requires_grad on"
            )
        if parameter not in owner:
            raise ValueError(
                f"model.name = {name}: parameter {key} is outside embedding, layers and head: no stage would hold it"
            )


def _model_class(name: str) -> Any:
    if name == "llama":
        from slimpipe.models.llama import Llama

        return Llama
    module_name, _, class_name = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"model.name = {name}: {error}; use llama or an importable package.module:Class") from error
    return found
