"""The whole of a run's settings: reading them, checking sections against each other, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from typing_extensions import Self

from slimpipe.config.allowed import divisors_near
from slimpipe.config.errors import ConfigError
from slimpipe.config.explain import explain, known_keys, unknown_key
from slimpipe.config.section import refuse
from slimpipe.config.sections import (
    DataConfig,
    LogConfig,
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PipelineConfig,
    TrainConfig,
)
from slimpipe.config.yaml_text import dump, parse, shown
from slimpipe.schedule import PlanError, Shape, exchange_refusal, place_layers, supported


class Config(BaseModel):
    """One run. Made by `load_config` or `Config.from_dict`; never changed afterwards."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelConfig
    parallel: ParallelConfig
    pipeline: PipelineConfig
    memory: MemoryConfig
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig
    log: LogConfig

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """Settings as nested mappings, as YAML gives them. A section left out or empty has its defaults.

        Raises ConfigError, a line for each problem.
        """
        sections = {key: {} if value is None else value for key, value in settings.items()}
        try:
            return cls.model_validate({name: {} for name in cls.model_fields} | sections)
        except ValidationError as error:
            raise ConfigError(explain(error, cls)) from error

    @property
    def microbatches(self) -> int:
        """m: microbatches a step that each data-parallel rank takes through the pipeline."""
        return self.train.global_batch // (self.parallel.dp * self.train.micro_batch)

    @property
    def shape(self) -> Shape:
        """(p, v, n, m) of the schedule."""
        return Shape(self.parallel.pp, self.pipeline.virtual_stages, self.pipeline.slices, self.microbatches)

    @property
    def vocab_parallel(self) -> bool:
        """Whether embedding and output layer are cut into rows over the pipeline's ranks (one rank: never)."""
        asked = self.pipeline.vocab_parallel
        wanted = self.pipeline.schedule == "slimpipe" if asked is None else asked
        return wanted and self.parallel.pp > 1

    def dump_yaml(self, path: str | Path) -> None:
        """Writes a file that `load_config` reads back as equal settings."""
        Path(path).write_text(self.to_yaml(), encoding="utf-8")

    def to_yaml(self) -> str:
        """All sections with their defaults; no value that follows from others (`Section.record`)."""
        return dump({name: getattr(self, name).record() for name in type(self).model_fields})

    @model_validator(mode="after")
    def _rules(self) -> Self:
        refuse(self._problems())
        return self

    def _problems(self) -> Iterator[str]:
        """One line for each rule across sections that is broken."""
        pipeline, train = self.pipeline, self.train
        length = self.data.sequence_length
        if length % pipeline.slices:
            use = divisors_near(length, pipeline.slices)
            yield pipeline.problem(
                "slices", f"sequence length {length} is not divisible by {pipeline.slices}; use a divisor ({use})"
            )
        if pipeline.exchange != "off" and pipeline.schedule != "slimpipe":
            yield pipeline.problem(
                "exchange",
                f"its loans need ranks in phase, which schedule {pipeline.schedule} does not keep; set it to off, or "
                "pipeline.schedule to slimpipe",
            )
        granule, tokens = pipeline.exchange_granule, length // pipeline.slices
        if granule is not None and tokens % granule:
            use = divisors_near(tokens, granule)
            yield pipeline.problem(
                "exchange_granule", f"a slice of {tokens} tokens is not divisible by {granule}; use a divisor ({use})"
            )
        if pipeline.vocab_parallel and pipeline.schedule != "slimpipe":
            yield pipeline.problem(
                "vocab_parallel",
                f"its passes need ranks in phase, which schedule {pipeline.schedule} does not keep; set it to false, "
                "or pipeline.schedule to slimpipe",
            )
        parallel = self.parallel
        if parallel.collectives == "symmetric" and parallel.carrier != "symmetric":
            yield parallel.problem("collectives", "needs parallel.carrier: symmetric; set that, or this to auto")
        if parallel.collectives == "nccl" and parallel.carrier == "host":
            yield parallel.problem("collectives", "under parallel.carrier: host gloo moves all; set this to auto")
        data = self.data
        if train.eval_every is not None and not (data.eval_share or data.eval_corpus or data.eval_blend):
            yield train.problem(
                "eval_every",
                "no data is kept for evaluation; set data.eval_share (0.01, say), data.eval_corpus or data.eval_blend",
            )
        if train.profile is not None and max(train.profile.steps) > train.steps:
            yield train.profile.problem("steps", f"must not be above train.steps ({train.steps}): no such step is done")
        if train.profile is not None and max(train.profile.ranks) >= self.parallel.pp:
            yield train.profile.problem("ranks", f"must be below parallel.pp ({self.parallel.pp}): ranks count from 0")
        lot = self.parallel.dp * train.micro_batch
        if train.global_batch % lot:
            up = -(-train.global_batch // lot) * lot
            yield train.problem(
                "global_batch",
                f"not divisible by parallel.dp x train.micro_batch = {lot}; use a multiple ({up}, {up + lot})",
            )
        else:
            reason = supported(pipeline.schedule, self.shape)
            if reason is not None:
                yield reason
        try:
            stages = self.parallel.pp * pipeline.virtual_stages
            placement = place_layers(self.model.layers, stages, pipeline.layers_per_stage)
        except PlanError as error:
            yield str(error)
        else:
            refusal = exchange_refusal(placement) if pipeline.exchange != "off" else None
            if refusal is not None:
                yield refusal


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Settings of a YAML file, with dotted overrides such as `pipeline.slices=16` (the last one of a key counts).

    An override's value is YAML. Raises ConfigError, a line for each problem.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: not a UTF-8 text (byte {error.start}); save it as UTF-8"]) from error
    except FileNotFoundError as error:
        reason = "no such file; give the path of a YAML file such as configs/quickstart.yaml"
        raise ConfigError([f"{path}: {reason}"]) from error
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from error
    settings = parse(text, str(path))
    if settings is None:
        settings = {}
    if not isinstance(settings, dict):
        raise ConfigError([f"{path}: must be a mapping of the sections {', '.join(Config.model_fields)}"])
    problems = [line for override in overrides for line in _apply(override, settings)]
    if problems:
        raise ConfigError(problems)
    return Config.from_dict(settings)


def _apply(override: str, settings: dict[str, Any]) -> list[str]:
    """Sets one `section.key=value` in `settings`; what is wrong with it, if anything."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals:
        return [f"{shown(override)}: not an override; write section.key=value, such as pipeline.slices=16"]
    known = tuple(known_keys(Config))
    if key in Config.model_fields:
        keys = ", ".join(name for name in known if name.startswith(f"{key}."))
        return [f"{key}: a section, not a key; override one of {keys}"]
    if key not in known and not key.startswith("model.options."):
        return [unknown_key(key, Config)]
    try:
        value = parse(text, f"{key}={text}")
    except ConfigError as error:
        return list(error.lines)
    *path, leaf = key.split(".")
    inner: Any = settings
    for name in path:
        if inner.get(name) is None:
            inner[name] = {}
        inner = inner[name]
        if not isinstance(inner, dict):
            return []  # the file has something else than a mapping there: validation names it
    inner[leaf] = value
    return []
