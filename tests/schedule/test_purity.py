"""The schedule is pure data: the standard library alone, importable with nothing else installed."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import slimpipe.schedule

FILES = sorted(Path(slimpipe.schedule.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_imports_the_standard_library_and_itself(path: Path) -> None:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names.add(node.module or "")
    foreign = {name for name in names if name.split(".")[0] not in sys.stdlib_module_names}
    assert all(name.startswith("slimpipe.schedule") for name in foreign)


def test_public_names_exist() -> None:
    for name in slimpipe.schedule.__all__:
        assert hasattr(slimpipe.schedule, name)
