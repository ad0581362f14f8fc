"""What nvidia-smi says while a benchmark runs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.clocks import Clocks, summary


def test_medians_of_whole_lines() -> None:
    lines = ["1980, 1980, 120.5, 700.00", "1500, 1980, 690, 700", "1410, 1980, 699, 700", "[N/A], 1980, 1, 1", "14", ""]
    assert summary(lines) == {"sm_mhz": 1500, "sm_mhz_max": 1980, "power_w": 690, "power_limit_w": 700}


def test_nothing_said() -> None:
    assert summary([]) == {}
    assert Clocks().stop() == {}


def test_a_program_that_goes_on_until_it_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "$@" > "$0.said"\necho 1500, 1980, 690, 700\nexec sleep 60\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    clocks = Clocks()
    clocks.start()
    assert clocks._running is not None
    deadline = time.monotonic() + 30
    while clocks._running[1].seek(0, 2) == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert clocks.stop()["sm_mhz"] == 1500
    assert "--id=2,3" in (tmp_path / "nvidia-smi.said").read_text()
