"""The pages in docs/: their code runs, their commands and keys exist, their links lead somewhere."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slimpipe.cli import app
from slimpipe.config import Config
from slimpipe.config.explain import known_keys
from slimpipe.train.session import Session
from tests.end_to_end.launch import QUICKSTART, slimpipe
from tests.numerics.harness import batch_of, case, config_of, copies, gathered
from tests.support.pool import Pool
from tests.support.reference import relative_error

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])


def blocks(page: str, language: str) -> list[str]:
    """The page's code of one language; "" is what a shell runs."""
    parts = re.split(r"^```(\w*)\n", (ROOT / "docs" / page).read_text(encoding="utf-8"), flags=re.M)
    # Text, then in turn: an opening fence's language, code, a closing fence's nothing, text.
    return [code for name, code in zip(parts[1::4], parts[2::4], strict=True) if name == language]


@pytest.fixture(scope="session")
def my_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with docs/your_model.md's file."""
    folder = tmp_path_factory.mktemp("my_model")
    (code,) = blocks("your_model.md", "python")
    (folder / "my_model.py").write_text(code, encoding="utf-8")
    return folder


def gradients(rank: int, world: int, folder: str, options: dict[str, Any]) -> tuple[float, dict[str, Any], list[str]]:
    if folder not in sys.path:
        sys.path.insert(0, folder)
    importlib.import_module("my_model")
    layout = case(**options)
    session = Session(config_of(layout, model={"name": "my_model:MyModel", "layers": 4, "options": {"gain": 0.5}}))
    for weight in session.weights().values():
        weight.mul_(3.0)
    plain = case(n=1, m=2)  # the same batch in every layout
    loss = session.step_gradients(*batch_of(plain))
    return loss, copies(session.gradients()), list(session.shards)


def test_the_pages_model_is_the_same_in_every_layout(my_model: Path, pool: Callable[[int], Pool]) -> None:
    ((expected, whole, _),) = pool(1).run(gradients, str(my_model), {"n": 1, "m": 2})
    for options in ({"n": 4, "m": 2}, {"pp": 2, "v": 2, "n": 4, "m": 2, "vocab_parallel": True}):
        ranks = pool(options.get("pp", 1)).run(gradients, str(my_model), options)
        assert ranks[0][0] == pytest.approx(expected, rel=1e-5)
        found = gathered("gradient", (rank[1] for rank in ranks), ranks[0][2])
        assert found.keys() == whole.keys()
        assert max(relative_error(found[name], whole[name]) for name in whole) < 1e-5
        assert all(float(gradient.abs().sum()) > 0 for gradient in found.values())


def test_the_pages_model_trains_by_the_pages_command(my_model: Path, small: list[str], tmp_path: Path) -> None:
    command = next(block for block in blocks("your_model.md", "") if block.startswith("slimpipe train"))
    words = command.replace("\\\n", " ").split()[1:]
    words[words.index("configs/quickstart.yaml")] = QUICKSTART
    words[-1] = f"train.output={tmp_path / 'run'}"
    done = slimpipe(*words, *small, "train.steps=3", PYTHONPATH=f"{ROOT}:{my_model}")
    assert done.code == 0, done.err
    assert "step 3/3" in done.out


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target


def test_the_index_names_every_page() -> None:
    text = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert {name for name in pages if name not in text} == set()


@pytest.mark.parametrize("page", ["first_run.md", "your_model.md", "multi_node.md", "weights.md", "evaluation.md"])
def test_commands_and_keys_of_a_page_exist(page: str) -> None:
    known = set(known_keys(Config))
    commands = {command.name or command.callback.__name__ for command in app.registered_commands}  # type: ignore[union-attr]
    commands |= {group.name for group in app.registered_groups}  # type: ignore[misc]
    text = "".join(blocks(page, "")) + "".join(blocks(page, "bash"))
    for command in re.findall(r"(?:^|\s)slimpipe ([a-z]+)", text):
        assert command in commands, command
    for key in re.findall(r"(?:^|\s)([a-z]+\.[a-z_]+)=", text):
        assert key in known or key.startswith("model.options"), key
    for path in re.findall(r"(?:^|\s)((?:configs|scripts)/[\w./]+)", text):
        assert (ROOT / path).exists(), path


SOURCES = [
    path
    for folder in ("slimpipe", "tests", "benchmarks", "configs", "csrc", "scripts", "docs")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".md", ".yaml", ".sh", ".cpp", ".h")
]


def test_what_the_code_refers_to_is_in_the_repository() -> None:
    """Pages, and sections of pages where a reference names one: `docs/page.md, "Section"`."""
    missing: list[tuple[str, str, str]] = []
    named = re.compile(r'docs/(\w+\.md)(?:,\s+"([^"]+)")?')
    for path in set(SOURCES) - {Path(__file__)}:
        for page, section in named.findall(path.read_text(encoding="utf-8")):
            file = ROOT / "docs" / page
            headings = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
            if not headings or (section and f"## {section}" not in headings):
                missing.append((str(path.relative_to(ROOT)), page, section))
    assert missing == []


def test_no_page_outside_the_repository_is_referred_to() -> None:
    outside = re.compile(r"\b(?:DESIGN|FACTS|STYLE)(?:\.md| section)")
    assert [str(path) for path in SOURCES if path != Path(__file__) and outside.search(path.read_text("utf-8"))] == []
