"""The commands that measure on GPUs, in the script and on pages, are ones that there are."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.pipeline import arguments

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_round.sh"
PAGES = sorted(path for path in (ROOT / "docs").glob("*.md") if path.name != "log.md")  # which tells of old ones


def commands(path: Path) -> list[str]:
    """What stands behind `benchmarks.pipeline` in a file; lines that go on are one."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    if path.suffix == ".md":  # between backticks, where lines may break, or on a line of its own
        text = re.sub(r"(?<!`)`(?!`)[^`]+`(?!`)", lambda found: found[0].replace("\n", " ") + "\n", text)
    return re.findall(r"benchmarks\.pipeline((?: +[-\w.]+)+)", text)


@pytest.mark.parametrize("path", [SCRIPT, *PAGES], ids=lambda path: path.name)
def test_options_and_cases_are_known(path: Path) -> None:
    for command in commands(path):
        words = [word for word in command.split() if word != "CASE"]
        assert not arguments().parse_known_args(words)[1], command


def test_commands_are_found() -> None:
    assert len(commands(SCRIPT)) >= 7
    assert len(re.findall("--collectives nccl symmetric", "".join(commands(ROOT / "docs" / "carriers.md")))) == 2


def test_an_unknown_part_is_told() -> None:
    done = subprocess.run([SCRIPT, "nothing"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "no part 'nothing'; parts are build tests" in done.stderr
