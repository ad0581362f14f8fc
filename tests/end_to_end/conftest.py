"""A small corpus and its cache, and no job around the tests of this folder."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that make of the quickstart a run of seconds: real text, but little of it, and short sequences."""
    folder = tmp_path_factory.mktemp("small")
    library = Path(sysconfig.get_paths()["stdlib"])
    text = "".join((library / name).read_text(encoding="utf-8") for name in ("argparse.py", "typing.py"))
    (folder / "text.py").write_text(text, encoding="utf-8")
    return [
        f"data.corpus={folder / 'text.py'}",
        f"data.cache_dir={folder / 'cache'}",
        "model.vocab_size=400",
        "data.sequence_length=64",
        "train.global_batch=2",
        "train.micro_batch=1",
    ]
