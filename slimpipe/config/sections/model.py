"""The section `model`: the network."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from slimpipe.config.allowed import Allowed, divisors_near
from slimpipe.config.section import Refused, Section

_PLAIN = "sliced attention needs plain causal attention over one document a row"

# Defaults that follow from other keys read these with `get`: some versions of pydantic compute a default even where a
# key it follows from is wrong. That key's own line is what the user sees.


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
