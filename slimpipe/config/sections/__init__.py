"""The eight sections of a run's settings. Types say what a key may hold; `problems` what keys owe each other."""

from slimpipe.config.sections.data import BlendSource, DataConfig
from slimpipe.config.sections.layout import ParallelConfig, PipelineConfig
from slimpipe.config.sections.log import LogConfig
from slimpipe.config.sections.memory import MemoryConfig, Recompute
from slimpipe.config.sections.model import ModelConfig, RopeScaling
from slimpipe.config.sections.optim import OptimConfig
from slimpipe.config.sections.train import ProfileConfig, TrainConfig

__all__ = [
    "BlendSource",
    "DataConfig",
    "LogConfig",
    "MemoryConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "PipelineConfig",
    "ProfileConfig",
    "Recompute",
    "RopeScaling",
    "TrainConfig",
]
