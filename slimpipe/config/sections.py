"""The eight sections of a run's settings. Types say what a key may hold; `problems` what keys owe each other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Gt
from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PlainValidator,
    PositiveFloat,
    PositiveInt,
)

from slimpipe.config.allowed import Allowed, divisors_near
from slimpipe.config.section import Planned, Refused, Section
from slimpipe.config.yaml_text import shown

_PLAIN = "sliced attention needs plain causal attention over one document a row"
_OR_NEVER = "a whole number >= 0 or null"


# Defaults that follow from other keys read these with `get`: some versions of pydantic compute a default even where a
# key it follows from is wrong. That key's own line is what the user sees.


def _above_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def _amount(value: Any) -> Any:
    """Off, auto or a share. YAML 1.1 reads `off` as false."""
    if value in ("off", "auto"):
        return value
    if value is False:
        return "off"
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1:
        return float(value)
    raise ValueError(value)


def _as_tuple(value: Any) -> Any:
    """YAML has lists; a frozen section holds tuples."""
    return tuple(value) if isinstance(value, list) else value


def _zero_is_null(value: Any) -> Any:
    return None if value == 0 and not isinstance(value, bool) else value


class RopeScaling(Section):
    """How rotary positions stretch beyond the length a model was made for."""

    path: ClassVar[str] = "model.rope_scaling"
    type: Literal["linear", "llama3"] = Field(description="`llama3` is the Llama 3.1 release's rule.")
    factor: PositiveFloat = Field(description="Frequencies are divided by it (`llama3`: the low ones).")
    low_freq_factor: PositiveFloat | None = Field(default=None, description="`llama3` only. Llama 3.1 has 1.")
    high_freq_factor: PositiveFloat | None = Field(default=None, description="`llama3` only. Llama 3.1 has 4.")
    original_max_position: PositiveInt | None = Field(default=None, description="`llama3` only. Llama 3.1 has 8192.")

    def problems(self) -> Iterator[str]:
        low, high = self.low_freq_factor, self.high_freq_factor
        for key in ("low_freq_factor", "high_freq_factor", "original_max_position"):
            given = getattr(self, key) is not None
            if given and self.type == "linear":
                yield self.problem(key, "only type llama3 has it; remove the key")
            if not given and self.type == "llama3":
                yield self.problem(key, "type llama3 needs a number here")
        if low is not None and high is not None and low >= high:
            yield self.problem("high_freq_factor", f"must be above low_freq_factor ({low})")


class ModelConfig(Section):
    """The network."""

    path: ClassVar[str] = "model"
    name: Annotated[str, Allowed("llama or package.module:Class")] = Field(
        default="llama",
        description="A model of slimpipe's, or a class of your own that keeps the contract of `slimpipe/models`.",
    )
    layers: PositiveInt = Field(description="Transformer blocks.")
    hidden_size: PositiveInt = Field(description="Width H of the residual stream.")
    heads: PositiveInt = Field(description="Query heads.")
    kv_heads: PositiveInt = Field(
        default_factory=lambda data: data.get("heads", 1),
        description="Key-value heads; fewer than `heads` is grouped-query attention. Default: `heads`.",
    )
    head_dim: PositiveInt = Field(
        default_factory=lambda data: max(1, data.get("hidden_size", 1) // data.get("heads", 1)),
        description="Width of one head, even. Default: `hidden_size / heads`.",
    )
    intermediate_size: PositiveInt = Field(description="Width of the feed-forward block.")
    vocab_size: PositiveInt = Field(description="Entries of the vocabulary; the tokenizer is trained to have as many.")
    tie_embeddings: bool = Field(default=False, description="Whether the output layer shares the embedding's weight.")
    rope_theta: PositiveFloat = Field(default=10000.0, description="Base of the rotary frequencies.")
    rope_scaling: RopeScaling | None = Field(default=None, description="Rotary scaling for long contexts, or null.")
    norm_eps: PositiveFloat = Field(default=1e-5, description="Epsilon of the RMS norms.")
    qk_norm: bool = Field(default=False, description="Whether queries and keys are normalised, head by head.")
    init_std: PositiveFloat = Field(default=0.02, description="Standard deviation of the initial weights.")
    options: dict[str, Any] = Field(default_factory=dict, description="Free settings for a model of your own.")
    sliding_window: Annotated[None, Refused("sliding windows", _PLAIN)] = Field(
        default=None, description="Not supported."
    )
    alibi: Annotated[None, Refused("ALiBi biases", _PLAIN)] = Field(default=None, description="Not supported.")
    document_mask: Annotated[None, Refused("document masks", _PLAIN)] = Field(
        default=None, description="Not supported."
    )

    def problems(self) -> Iterator[str]:
        if self.name != "llama" and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", self.name):
            yield self.problem("name", "unknown model; must be llama or package.module:Class")
        if self.name == "llama" and self.options:
            yield self.problem("options", "llama has no options; remove the key")
        if self.heads % self.kv_heads:
            use = divisors_near(self.heads, self.kv_heads)
            yield self.problem(
                "kv_heads", f"heads {self.heads} is not divisible by {self.kv_heads}; use a divisor ({use})"
            )
        if "head_dim" not in self.model_fields_set and self.hidden_size % self.heads:
            yield self.problem(
                "hidden_size", f"not divisible by model.heads = {self.heads}; use a multiple, or set model.head_dim"
            )
        elif self.head_dim % 2:
            yield self.problem("head_dim", "must be even: rotary positions turn pairs; change it or model.heads")


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
        description="What moves tensors between ranks. `auto`: NCCL between GPUs, gloo between CPUs. `symmetric`: "
        "sends and the exchange by copy engine, through memory that the GPUs of a node share (new: docs/carriers.md "
        "says what has been run); collectives by NCCL. `host`: gloo, through host memory: slow, but several processes "
        "can share a GPU.",
    )
    collectives: Literal["auto", "symmetric"] = Field(
        default="auto",
        description="What moves the vocabulary passes' tensors. `auto`: NCCL, or gloo where that moves the others too. "
        "`symmetric`: as the sends of `parallel.carrier: symmetric`, which it needs; not yet run on GPUs.",
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
    layers_per_stage: Annotated[tuple[PositiveInt, ...] | None, BeforeValidator(_as_tuple)] = Field(
        default=None, description="Layers of each of the pp x v stages in turn. Default: as even as can be."
    )
    exchange: Literal["off", "pairwise", "balanced"] = Field(
        default="off",
        description="How ranks share attention work: not; in pairs, as the SlimPipe paper has it; or over all ranks, "
        "idle ones too. Needs schedule `slimpipe` and equally many layers a stage.",
    )
    exchange_granule: PositiveInt | None = Field(
        default=None, description="Loans start and stop at multiples of so many tokens. Default: a quarter of a slice."
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


class BlendSource(Section):
    """One source of a blend."""

    path: ClassVar[str] = "data.blend[i]"
    corpus: Annotated[str, Field(min_length=1), Allowed("a path")] = Field(description="As `data.corpus`.")
    weight: PositiveFloat = Field(
        default=1.0, description="Its share of the sequences, in proportion to the other weights."
    )


_Blend = Annotated[
    tuple[BlendSource, ...] | None,
    Allowed("a list of mappings with the keys corpus, weight, or null"),
    BeforeValidator(_as_tuple),
]


class DataConfig(Section):
    """What is read. One of `corpus` and `blend` is required."""

    path: ClassVar[str] = "data"
    corpus: Annotated[str | None, Field(min_length=1), Allowed("python_stdlib or a path")] = Field(
        default=None,
        description="`python_stdlib` (the running interpreter's own library sources); a file of text, JSON lines, "
        "Parquet "
        "or Arrow, or a folder of those; or a token file, the `PREFIX` of Megatron's `PREFIX.bin` and `PREFIX.idx`.",
    )
    blend: _Blend = Field(default=None, description="Several sources, sequences taken from each in turn by weight.")
    eval_share: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="The last part of each source that is kept for evaluation and never trained on."
    )
    eval_corpus: Annotated[str | None, Field(min_length=1), Allowed("a path or null")] = Field(
        default=None, description="What to evaluate on instead, as `corpus`."
    )
    eval_blend: _Blend = Field(default=None, description="The same as a blend.")
    sequence_length: PositiveInt = Field(description="Tokens S a sequence.")
    tokenizer: Annotated[str | None, Field(min_length=1), Allowed("a path, a name or null")] = Field(
        default=None,
        description="A Hugging Face `tokenizer.json`, a folder that has one, or the name of a model in Hugging Face's "
        "cache "
        "on this machine. Default: the one beside a token file, or else one of `model.vocab_size` tokens learnt from "
        "the "
        "text.",
    )
    end_of_text: Annotated[str | None, Field(min_length=1), Allowed("text or null")] = Field(
        default=None,
        description="The token of `tokenizer` between documents. Default: the `eos_token` of its "
        "`tokenizer_config.json`, or a well-known one.",
    )
    text_key: Annotated[str, Field(min_length=1)] = Field(
        default="text", description="The key of JSON lines, or the column of Parquet and Arrow, that has the text."
    )
    cache_dir: Annotated[str, Field(min_length=1), Allowed("a path")] = Field(
        default="~/.cache/slimpipe", description="Where tokenizers and token files are kept."
    )

    def sources(self) -> list[tuple[str, str, float]]:
        """(key, corpus, weight) of each source that is trained on."""
        return _sources("corpus", self.corpus, "blend", self.blend)

    def eval_sources(self) -> list[tuple[str, str, float]]:
        """The same of each source for evaluation alone."""
        return _sources("eval_corpus", self.eval_corpus, "eval_blend", self.eval_blend)

    def problems(self) -> Iterator[str]:
        if self.corpus is None and self.blend is None:
            yield "data.corpus: missing; must be python_stdlib or a path (or set data.blend)"
        if self.corpus is not None and self.blend is not None:
            yield self.problem("corpus", "data.blend is set as well; remove one of them")
        for key in ("blend", "eval_blend"):
            if getattr(self, key) == ():
                yield self.problem(key, "names no source; write [{corpus: PATH, weight: 1.0}, ...], or remove it")
        ways = [key for key in ("eval_share", "eval_corpus", "eval_blend") if getattr(self, key)]
        if len(ways) > 1:
            yield self.problem(ways[0], f"data.{ways[1]} is set as well; remove one of them")
        if self.end_of_text is not None and self.tokenizer is None:
            yield self.problem(
                "end_of_text", "says something of data.tokenizer, which is missing; remove it, or set that"
            )


def _sources(
    key: str, corpus: str | None, blend_key: str, blend: tuple[BlendSource, ...] | None
) -> list[tuple[str, str, float]]:
    if corpus is not None:
        return [(f"data.{key}", corpus, 1.0)]
    return [(f"data.{blend_key}[{i}].corpus", source.corpus, source.weight) for i, source in enumerate(blend or ())]


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
    grad_clip: Annotated[PositiveFloat | None, Allowed("a number >= 0 or null"), BeforeValidator(_zero_is_null)] = (
        Field(1.0, description="Largest norm of all gradients together; 0 or null: no clipping.")
    )

    def problems(self) -> Iterator[str]:
        if self.min_lr > self.lr:
            yield self.problem("min_lr", f"must be at most optim.lr ({self.lr})")


class ProfileConfig(Section):
    """Which steps torch's profiler traces, on which ranks."""

    path: ClassVar[str] = "train.profile"
    steps: Annotated[tuple[PositiveInt, ...], BeforeValidator(_as_tuple), Field(min_length=1)] = Field(
        description="Steps to trace, counted from 1; the first is not typical."
    )
    ranks: Annotated[tuple[NonNegativeInt, ...], BeforeValidator(_as_tuple), Field(min_length=1)] = Field(
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

    eval_every: Annotated[PositiveInt | None, Allowed(_OR_NEVER), BeforeValidator(_zero_is_null)] = Field(
        default=None,
        description="Steps between evaluations on the data kept for them (`data.eval_share` and the like), and one "
        "after the last step; 0 or null: none.",
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
