"""The section `optim`: AdamW and its learning rate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from slimpipe.config.allowed import Allowed
from slimpipe.config.section import Section
from slimpipe.config.sections.coerce import zero_is_null


class OptimConfig(Section):
    """AdamW and its learning rate."""

    path: ClassVar[str] = "optim"
    lr: PositiveFloat = Field(default=3e-4, description="Peak learning rate.")
    min_lr: NonNegativeFloat = Field(
        default_factory=lambda data: 0.1 * data.get("lr", 0.0),
        description="Where the cosine ends. Default: a tenth of `lr`.",
    )
    warmup_steps: NonNegativeInt = Field(default=0, description="Steps over which the rate rises from 0.")
    schedule: Literal["cosine", "constant"] = Field(default="cosine", description="The rate after the warm-up.")
    weight_decay: NonNegativeFloat = Field(default=0.1, description="Decoupled weight decay.")
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.9, description="Decay of the first moment.")
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.95, description="Decay of the second moment.")
    eps: PositiveFloat = Field(default=1e-8, description="Epsilon of Adam.")
    grad_clip: Annotated[PositiveFloat | None, Allowed("a number >= 0 or null"), BeforeValidator(zero_is_null)] = Field(
        1.0, description="Largest norm of all gradients together; 0 or null: no clipping."
    )

    def problems(self) -> Iterator[str]:
        if self.min_lr > self.lr:
            yield self.problem("min_lr", f"must be at most optim.lr ({self.lr})")
