"""The sections `parallel` and `pipeline`: which processes share the work, and in which order they do it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field, PositiveInt

from slimpipe.config.allowed import Allowed
from slimpipe.config.section import Planned, Section
from slimpipe.config.sections.coerce import as_tuple

AUTO_SHARES_UP_TO: Final = 2
"""The longest pipeline, in ranks, whose traffic `auto` puts into memory that its GPUs share. Longer ones take NCCL
until these have run on four GPUs, and passed (docs/carriers.md says what has been run):

    pytest tests/gpu/test_symmetric.py
    python -m benchmarks.pipeline --ranks 4 --only 64k-n16-vocab 64k-n16-balanced --carrier nccl symmetric
"""


def _above_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1


class ParallelConfig(Section):
    """How many processes share the work, along each axis. Their product is the number of processes."""

    path: ClassVar[str] = "parallel"
    pp: PositiveInt = Field(default=1, description="Pipeline ranks p: layers are spread over them.")
    tp: Annotated[PositiveInt, Allowed("1"), Planned("tensor parallelism", when=_above_one)] = Field(
        default=1, description="Tensor-parallel ranks."
    )
    cp: Annotated[PositiveInt, Allowed("1"), Planned("context parallelism", when=_above_one)] = Field(
        default=1, description="Context-parallel ranks."
    )
    ep: Annotated[PositiveInt, Allowed("1"), Planned("expert parallelism", when=_above_one)] = Field(
        default=1, description="Expert-parallel ranks, taken from the data-parallel ones."
    )
    dp: Annotated[PositiveInt, Allowed("1"), Planned("data parallelism", when=_above_one)] = Field(
        default=1, description="Data-parallel ranks."
    )
    carrier: Literal["auto", "nccl", "symmetric", "host"] = Field(
        default="auto",
        description="What moves sends and the exchange between ranks. `symmetric`: copy engines, through memory that "
        "the GPUs of a node share; refused where two ranks cannot. `nccl`: NCCL. `auto`: in a pipeline of two ranks "
        "the first where they can, else NCCL (docs/carriers.md says what has been run); gloo between CPUs. `host`: "
        "gloo, through host memory: slow, but several processes can share a GPU.",
    )
    collectives: Literal["auto", "nccl", "symmetric"] = Field(
        default="auto",
        description="What moves the vocabulary passes' tensors. `symmetric`: as the sends of `parallel.carrier: "
        "symmetric`, which it needs; run on two GPUs. `nccl`: NCCL, also where sends go another way. `auto`: in a "
        "pipeline of two ranks as their sends, else NCCL; gloo where that moves the others.",
    )
    nccl_ctas: Annotated[int | None, Field(ge=1, le=64), Allowed("a whole number from 1 to 64, or null")] = Field(
        default=None,
        description="Most thread blocks, so at most as many of the GPU's processors, that one NCCL transfer between "
        "pipeline ranks holds, also while it waits for the other side. Default: three quarters of them shared out "
        "among a rank's communicators (14 on an H200 with vocabulary passes and exchange), so that transfers that wait "
        "cannot keep another from starting.",
    )

    @property
    def world_size(self) -> int:
        """Processes the run needs. Experts live on data-parallel ranks and add none."""
        return self.pp * self.tp * self.cp * self.dp

    @property
    def shares_memory(self) -> Literal["never", "auto", "always"]:
        """Between which GPUs of a pipeline sends and the exchange go through shared memory: `auto` between those that
        can, `always` is refused where some cannot."""
        if self.carrier == "symmetric":
            return "always"
        return "auto" if self.carrier == "auto" and 1 < self.pp <= AUTO_SHARES_UP_TO else "never"

    @property
    def shares_passes(self) -> bool:
        """Whether the vocabulary passes' tensors do too, where all ranks share memory."""
        if self.collectives != "auto":
            return self.collectives == "symmetric"
        return self.shares_memory != "never" and self.pp <= AUTO_SHARES_UP_TO


class PipelineConfig(Section):
    """The schedule."""

    path: ClassVar[str] = "pipeline"
    schedule: Annotated[
        Literal["gpipe", "1f1b", "interleaved", "slimpipe"],
        Planned("this schedule", ("terapipe", "seq1f1b", "zb_v", "v_half", "v_min")),
    ] = Field(
        default="slimpipe", description="Order of forwards and backwards. All but `slimpipe` run whole sequences."
    )
    slices: PositiveInt = Field(default=1, description="Slices n a sequence; divides `data.sequence_length`.")
    virtual_stages: PositiveInt = Field(
        default=1, description="Model chunks v a rank. Above 1, `slimpipe` needs `slices` >= `parallel.pp`."
    )
    layers_per_stage: Annotated[tuple[PositiveInt, ...] | None, BeforeValidator(as_tuple)] = Field(
        default=None, description="Layers of each of the pp x v stages in turn. Default: as even as can be."
    )
    exchange: Literal["off", "pairwise", "balanced"] = Field(
        default="off",
        description="How ranks share attention work: not; in pairs, as the SlimPipe paper has it; or over all ranks, "
        "idle ones too. Needs schedule `slimpipe` and equally many layers a stage.",
    )
    exchange_granule: PositiveInt | None = Field(
        default=None,
        description="Loans of `balanced` start and stop at multiples of so many tokens. Default: a quarter of a slice.",
    )
    exchange_keep: Literal["none", "kv"] = Field(
        default="none", description="`kv`: helpers hold lent keys and values until the backward where they can."
    )
    hardware: Annotated[str | None, Allowed("a path or null")] = Field(
        default=None,
        description="Hardware profile (YAML) by whose rates and links the exchange is planned: loans that cost more "
        "than they save are not made, and `exchange_granule` is chosen. Default: every loan is made. Also what "
        "`memory.swap` takes the times of slices and copies from; default: an H200's.",
    )
    receives_ahead: Annotated[int | None, Field(ge=0, le=2), Allowed("0, 1, 2 or null")] = Field(
        default=None,
        description="Actions by which a receive is posted before its tensor is used. A receive of NCCL's occupies part "
        "of the GPU from then on. Default: 0 with vocabulary passes or exchange, else 2.",
    )
    vocab_parallel: Annotated[bool | None, Allowed("true, false or null")] = Field(
        default=None,
        description="Whether embedding and output layer are spread over all pipeline ranks. "
        "Default: with schedule `slimpipe`, whose ranks are in phase.",
    )
    trace: bool = Field(default=False, description="Print every action and transfer.")

    def problems(self) -> Iterator[str]:
        if self.exchange != "off":
            return
        for key in ("exchange_granule", "exchange_keep"):
            if getattr(self, key) != type(self).model_fields[key].default:
                yield self.problem(
                    key,
                    "says something with pipeline.exchange alone, which is off; set that to balanced, or remove it",
                )
