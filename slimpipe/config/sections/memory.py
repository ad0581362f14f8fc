"""The section `memory`: what activations cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator, PositiveFloat

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
        "keeps the device within `gpu_budget_gib`. A number: that share of what can move (keys and values cannot).",
    )
    gpu_budget_gib: PositiveFloat | None = Field(
        default=None,
        description="With `swap: auto`: GiB of the device that a rank may use, everything included. Default: 90 % of "
        "the GPU's memory; on a CPU nothing moves without one.",
    )
    host_budget_gib: PositiveFloat | None = Field(
        default=None,
        description="GiB of host memory that a rank may pin for `swap`. Default: as much as it needs.",
    )

    def problems(self) -> Iterator[str]:
        if self.gpu_budget_gib is not None and self.swap != "auto":
            yield self.problem("gpu_budget_gib", "says something with memory.swap: auto alone; set that, or remove it")
        if self.host_budget_gib is not None and self.swap == "off":
            yield self.problem("host_budget_gib", "says something with memory.swap alone; set that, or remove it")
