"""Packages import in one direction (docs/architecture.md), and schedules need no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import slimpipe
from tests.end_to_end.launch import ROOT

PACKAGE = Path(slimpipe.__file__).parent
# What a package may import of the others when it runs; types alone (under TYPE_CHECKING) may come from anywhere.
ALLOWED: dict[str, set[str]] = {
    "schedule": set(),
    "kernels": set(),
    "data": set(),
    "report": set(),
    "config": {"schedule"},
    "telling": {"schedule", "config"},
    "plan": {"schedule"},
    "doctor": {"kernels", "plan"},
    "swap": {"kernels"},
    "models": {"config", "kernels"},
    "runtime": {"schedule", "kernels", "models", "swap"},
    "parallel": {"kernels", "runtime"},
    # A package of its own in this: weights are read from checkpoints, and training starts from weights.
    "train.checkpoint": {"runtime"},
    "weights": {"config", "data", "models", "train.checkpoint"},
    "calibrate": {"config", "schedule", "plan", "kernels", "runtime", "parallel", "telling"},
    "train": {
        *("schedule", "kernels", "data", "config", "plan", "parallel", "models", "runtime", "swap"),
        *("train.checkpoint", "weights"),
    },
}
# The command line stands above all.
TOP = {"__init__", "__main__", "cli", "cli_data", "cli_paper", "cli_plan", "cli_schedule"}
FILES = sorted(PACKAGE.rglob("*.py"))


def imported(node: ast.AST) -> Iterator[str]:
    """Modules that the code below `node` imports at run time, wherever in it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: a relative import"
            # `from slimpipe import train` is an import of slimpipe.train.
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        else:
            yield from imported(child)


def package(parts: list[str]) -> str:
    """Of a module's or a file's name, less `slimpipe`."""
    return "train.checkpoint" if parts[:2] == ["train", "checkpoint"] else parts[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    own = package(list(path.relative_to(PACKAGE).with_suffix("").parts))
    if own in TOP:
        return
    assert own in ALLOWED, f"slimpipe/{own}: say in ALLOWED what it may import"
    modules = [name.split(".") for name in imported(ast.parse(path.read_text(encoding="utf-8")))]
    packages = {package(parts[1:]) for parts in modules if parts[0] == "slimpipe" and len(parts) > 1}
    assert packages - {own} <= ALLOWED[own]


def test_what_is_allowed_has_no_circle() -> None:
    """Each package is allowed what stands above it in the table alone."""
    seen: set[str] = set()
    for package, others in ALLOWED.items():
        assert others <= seen
        seen.add(package)


def test_schedules_settings_and_plans_need_no_torch() -> None:
    """Every module of theirs, with torch made impossible to import."""
    light = [path for path in FILES if path.relative_to(PACKAGE).parts[0] in ("schedule", "config", "plan")]
    modules = sorted(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in light)
    assert len(modules) > 20
    code = "import sys, importlib; sys.modules['torch'] = None; [importlib.import_module(m) for m in sys.argv[1:]]"
    result = subprocess.run(
        [sys.executable, "-c", code, *modules], capture_output=True, text=True, cwd=ROOT, timeout=180
    )
    assert result.returncode == 0, result.stderr
