"""The section `train`: the run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from slimpipe.config.allowed import Allowed
from slimpipe.config.section import Section
from slimpipe.config.sections.coerce import as_tuple, zero_is_null
from slimpipe.config.yaml_text import shown


class ProfileConfig(Section):
    """Which steps torch's profiler traces, on which ranks."""

    path: ClassVar[str] = "train.profile"
    steps: Annotated[tuple[PositiveInt, ...], BeforeValidator(as_tuple), Field(min_length=1)] = Field(
        description="Steps to trace, counted from 1; the first is not typical."
    )
    ranks: Annotated[tuple[NonNegativeInt, ...], BeforeValidator(as_tuple), Field(min_length=1)] = Field(
        default=(0,), description="Pipeline ranks that write a trace to the run's folder, `profile/`."
    )


class TrainConfig(Section):
    """The run."""

    path: ClassVar[str] = "train"
    steps: PositiveInt = Field(description="Optimizer steps.")
    output: Annotated[str, Field(min_length=1), Allowed("a path")] = Field(
        description="The run's folder: `config.yaml`, `metrics.jsonl`, `checkpoints`. A run that is there goes on."
    )
    init_from: Annotated[str | None, Field(min_length=1), Allowed("a path or null")] = Field(
        default=None,
        description="Weights that a new run starts from, and nothing else: a run's folder, a checkpoint's, or a "
        "Hugging Face folder of a Llama (`config.json`, `*.safetensors`). A run with checkpoints goes on from those.",
    )
    global_batch: PositiveInt = Field(description="Sequences a step, over all data-parallel ranks.")
    micro_batch: PositiveInt = Field(
        default=1,
        description="Sequences a microbatch; the number of microbatches m is `global_batch / (dp * micro_batch)`.",
    )
    seed: NonNegativeInt = Field(default=0, description="Of weights and of the order of the data.")
    checkpoint_every: PositiveInt | None = Field(
        default=None,
        description="Steps between checkpoints. One is also written at the end and when the run is asked to stop; "
        "null: only then.",
    )
    keep_last: PositiveInt = Field(default=2, description="Checkpoints that stay: so many of the newest.")
    keep_every: PositiveInt | None = Field(
        default=None, description="Checkpoints after a multiple of so many steps stay for good; null: none does."
    )
    async_checkpoint: bool = Field(
        default=True,
        description="Write checkpoints while training goes on, from a copy of the rank's weights and moments in host "
        "memory (12 bytes a parameter). false: wait for the disk.",
    )
    checkpoint_seconds: PositiveFloat = Field(
        default=3600.0, description="A checkpoint that takes longer has failed, and ends the run."
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Of weights and activations in compute."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="`auto`: a GPU where there is one.")
    deterministic: bool = Field(
        default=False, description="Deterministic kernels throughout: equal runs give equal bits."
    )
    watchdog_seconds: PositiveFloat = Field(
        default=300.0, description="Without progress for so long, name what each rank does and stop."
    )
    on_nonfinite: Literal["stop", "skip"] = Field(
        default="stop",
        description="A step whose loss or gradient is not finite changes nothing; it stops the run, or is skipped.",
    )
    max_skips: PositiveInt = Field(default=10, description="So many skipped steps in a row stop the run all the same.")
    profile: ProfileConfig | None = Field(
        default=None, description="Traces of chosen steps by torch's profiler, or null."
    )
    attention: Literal["auto", "plain", "flash", "cudnn", "flash2", "flash3", "flash4"] = Field(
        default="auto",
        description="Attention backend. `auto`: on a GPU the fastest that is there, by a short measurement that "
        "`data.cache_dir` keeps; else `plain`. `flash` is torch's own FlashAttention-2, the numbered ones are the "
        "flash-attn packages (extra `flash`: version 4).",
    )
    ce_chunk: PositiveInt | None = Field(
        default=None,
        description="Tokens a chunk of the output layer: bounds its temporaries. Default: by free memory, and shown.",
    )
    weight_grad_slices: PositiveInt = Field(
        default=1,
        description="Backwards whose weight gradients one GEMM adds. Above 1, slices' activations and gradients wait "
        "for it in memory; worth a try where slices are short (`benchmarks/weight_grad.py`). For slimpipe's layers.",
    )
    z_loss: NonNegativeFloat = Field(
        default=0.0, description="Weight of the squared log-sum-exp of the logits in the loss; keeps it near 0."
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="Share of each target that is spread over the whole vocabulary."
    )

    eval_every: Annotated[PositiveInt | None, Allowed("a whole number >= 0 or null"), BeforeValidator(zero_is_null)] = (
        Field(
            default=None,
            description="Steps between evaluations on the data kept for them (`data.eval_share` and the like), and one "
            "after the last step; 0 or null: none.",
        )
    )
    eval_batches: PositiveInt = Field(
        default=8,
        description="Batches of `global_batch` sequences an evaluation, the same ones each time.",
    )

    def problems(self) -> Iterator[str]:
        every, good = self.checkpoint_every, self.keep_every
        if good is not None and (every is None or good % every):
            remedy = (
                "set that too" if every is None else f"use a multiple, such as {every * max(1, round(good / every))}"
            )
            yield self.problem("keep_every", f"no multiple of train.checkpoint_every ({shown(every)}); {remedy}")
        if self.attention in ("auto", "plain"):
            return
        if self.dtype != "bfloat16":
            yield self.problem("attention", f"not for train.dtype {self.dtype}; use plain or train.dtype: bfloat16")
        if self.device == "cpu":
            yield self.problem("attention", "runs on a GPU only; use plain or train.device: cuda")
        if self.attention != "flash" and self.deterministic:
            yield self.problem(
                "attention", "its backward is not deterministic; use flash or train.deterministic: false"
            )
