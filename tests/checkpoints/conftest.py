"""A small corpus, and the settings of a tiny model's runs on it."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

TINY = """
model: {layers: 4, hidden_size: 16, heads: 2, intermediate_size: 32, vocab_size: 300, tie_embeddings: true}
parallel: {pp: 2}
pipeline: {slices: 2}
optim: {lr: 1.0e-2, warmup_steps: 3}
"""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A configuration file and overrides; without `train.output` and `train.steps`."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "tiny.yaml").write_text(TINY)
    library = Path(sysconfig.get_paths()["stdlib"])
    (folder / "text.py").write_text((library / "argparse.py").read_text(encoding="utf-8"), encoding="utf-8")
    overrides = [
        f"data.corpus={folder / 'text.py'}",
        f"data.cache_dir={folder / 'cache'}",
        "data.sequence_length=32",
        "train.global_batch=2",
        "train.device=cpu",
        "train.watchdog_seconds=60",
    ]
    return [str(folder / "tiny.yaml"), *overrides]


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[tuple[int, float, float, float]]:
    """(step, loss, gradient norm, rate) of every row: what must not change by a bit."""
    return [(row["step"], row["loss"], row["grad_norm"], row["lr"]) for row in rows(run)]


def checkpoints(run: Path) -> list[str]:
    """Names of what is in the run's folder of checkpoints, in no order of the steps."""
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def names(steps: Sequence[int]) -> list[str]:
    return sorted(f"step_{step}" for step in steps)
