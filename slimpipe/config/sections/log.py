"""The section `log`: what is shown."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from annotated_types import Gt
from pydantic import Field, PositiveFloat, PositiveInt

from slimpipe.config.allowed import Allowed
from slimpipe.config.section import Section


class LogConfig(Section):
    """What is shown."""

    path: ClassVar[str] = "log"
    every: PositiveInt = Field(
        default=1, description="Steps between lines of the display. `metrics.jsonl` has every step."
    )
    tensorboard: bool = Field(default=False, description="Also write TensorBoard events to the run's folder.")
    wandb: Annotated[str | None, Field(min_length=1), Allowed("the name of a project or null")] = Field(
        default=None, description="Also log to this project of Weights & Biases; `WANDB_MODE=offline` sends nothing."
    )
    display: Literal["auto", "rich", "plain", "none"] = Field(
        default="auto", description="`auto`: `rich` on a terminal, else `plain`."
    )
    peak_tflops: PositiveFloat | None = Field(
        default=None, description="TFLOP/s of one device at most, for MFU. Default: by the device's name where known."
    )
    window: Annotated[int, Field(ge=3)] = Field(
        default=50, description="Steps over which loss spikes and outliers among ranks are judged."
    )
    spike_threshold: PositiveFloat | None = Field(
        default=8.0,
        description="A loss so many robust deviations above the window's median is told as a spike; null: never.",
    )
    outlier_threshold: Annotated[float, Gt(1)] | None = Field(
        default=1.5,
        description="A rank whose compute, beside its share of the work, or memory, beside its prediction, is so many "
        "times the others' is named; null: never.",
    )
