"""The systems by name, and a case's settings."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from benchmarks import pipeline
from benchmarks.jobs import Case
from slimpipe.config import Config
from slimpipe.parallel.mesh import Processes

MODULES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "slimpipe": "ours",
        "megatron 1F1B": "megatron",
        "megatron interleaved": "megatron",
        "torch 1F1B": "torch_pipeline",
        "torch interleaved": "torch_pipeline",
        "FSDP2 + CP": "torch_context",
        "link": "link",
    }
)


def config_of(case: Case) -> Config:
    """Model, data, optimizer and steps of the case. A peer's layout is its own affair."""
    if case["system"] == "slimpipe":
        return pipeline.config_of(case)
    plain = {"n": 1, "v": 1, "vocab": False, "recompute": "none", "exchange": "off", "hardware": None}
    return pipeline.config_of(case | plain)


def run(config: Config, case: Case, processes: Processes) -> dict[str, Any] | None:
    """One rank of the case; on rank 0 the row. Its file is imported here: not every machine has every peer."""
    module = importlib.import_module(f"benchmarks.peers.{MODULES[case['system']]}")
    found: dict[str, Any] | None = module.run(config, case, processes)
    return found
