"""The settings of a run: YAML <-> typed sections. Every error names the key, its value and what is allowed."""

from slimpipe.config.errors import ConfigError
from slimpipe.config.launch import check_output, check_world, job_size
from slimpipe.config.reference import reference_markdown
from slimpipe.config.root import Config, load_config
from slimpipe.config.sections import (
    DataConfig,
    LogConfig,
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PipelineConfig,
    Recompute,
    RopeScaling,
    TrainConfig,
)

__all__ = [
    "Config",
    "ConfigError",
    "DataConfig",
    "LogConfig",
    "MemoryConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "PipelineConfig",
    "Recompute",
    "RopeScaling",
    "TrainConfig",
    "check_output",
    "check_world",
    "job_size",
    "load_config",
    "reference_markdown",
]
