"""The section `data`: what is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt

from slimpipe.config.allowed import Allowed
from slimpipe.config.section import Section
from slimpipe.config.sections.coerce import as_tuple


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
    BeforeValidator(as_tuple),
]


class DataConfig(Section):
    """What is read. One of `corpus` and `blend` is required."""

    path: ClassVar[str] = "data"
    corpus: Annotated[str | None, Field(min_length=1), Allowed("python_stdlib or a path")] = Field(
        default=None,
        description="`python_stdlib` (the running interpreter's own library sources); a file of text, JSON lines, "
        "Parquet or Arrow, or a folder of those; or a token file, the `PREFIX` of Megatron's `PREFIX.bin` and "
        "`PREFIX.idx`.",
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
        "cache on this machine. Default: the one beside a token file, or else one of `model.vocab_size` tokens learnt "
        "from the text.",
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
