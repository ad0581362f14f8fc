"""The section `memory`: what activations cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainValidator, PositiveFloat

from slimpipe.config.allowed import Allowed
from slimpipe.config.section import Section


def _amount(value: Any) -> Any:
    """Off, auto or a share. YAML 1.1 reads `off` as false."""
    if value in ("off", "auto"):
        return value
    if value is False:
        return "off"
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1:
        return float(value)
    raise ValueError(value)


def _switch(value: Any) -> Any:
    """YAML 1.1 reads `on` and `off` as true and false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Recompute = Literal["none", "norms", "mlp", "all_but_attention", "full"]


class MemoryConfig(Section):
    """What activations cost."""

    path: ClassVar[str] = "memory"
    recompute: Recompute = Field(
        default="none",
        description="What is made again in the backward, each more than the last. `norms`: norm outputs and the SwiGLU "
        "product; `mlp`: also the gate and up projection; `all_but_attention`: all of a block but its attention, whose "
        "output is kept; `full`: attention too.",
    )
    swap: Annotated[
        Literal["off", "auto"] | float, Allowed("off, auto or a number > 0 and <= 1"), PlainValidator(_amount)
    ] = Field(
        default="off",
        description="Activations to host memory between a slice's forward and its backward. `auto`: the least that "
        "keeps the device within `gpu_budget_gib`. A number: that share of what can move, keys and values left out.",
    )
    kv_swap: Annotated[Literal["off", "auto", "on"], BeforeValidator(_switch)] = Field(
        default="auto",
        description="Keys, values and their gradients in host memory, two layers' of them on the device at a time. "
        "`on`: on every rank. `auto`: with `swap: auto`, on ranks that activations alone do not bring within the "
        "budget.",
    )
    gpu_budget_gib: PositiveFloat | None = Field(
        default=None,
        description="With `swap: auto`: GiB of the device that a rank may use, everything included. Default: 90 % of "
        "the GPU's memory; on a CPU nothing moves without one.",
    )
    host_budget_gib: PositiveFloat | None = Field(
        default=None,
        description="GiB of host memory that a rank may pin for `swap` and `kv_swap`. Default: as much as it needs.",
    )

    def problems(self) -> Iterator[str]:
        if self.gpu_budget_gib is not None and self.swap != "auto":
            yield self.problem("gpu_budget_gib", "says something with memory.swap: auto alone; set that, or remove it")
        if self.host_budget_gib is not None and self.swap == "off" and self.kv_swap != "on":
            yield self.problem(
                "host_budget_gib", "says something with memory.swap or kv_swap: on alone; set one, or remove it"
            )
