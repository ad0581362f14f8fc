"""The script that measures on GPUs names cases that there are."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from benchmarks.pipeline import CASES

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_round.sh"


def test_every_case_is_known() -> None:
    text = SCRIPT.read_text(encoding="utf-8").replace("\\\n", " ")
    named = [
        found.split() for found in re.findall(r"benchmarks\.pipeline .*--only ([^-;][^;]*?)(?: --|;;|$)", text, re.M)
    ]
    assert len(named) >= 6
    assert {name for names in named for name in names} <= set(CASES)


def test_an_unknown_part_is_told() -> None:
    done = subprocess.run([SCRIPT, "nothing"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "no part 'nothing'; parts are build tests" in done.stderr
