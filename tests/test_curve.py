"""The loss curve in the terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slimpipe.train.curve import main, render


def write(folder: Path, losses: list[float], more: str = "") -> Path:
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": i, "loss": loss}) + "\n" for i, loss in enumerate(losses)) + more)
    return path


def heights(chart: str) -> list[int]:
    """For each column of dots' cells, the first row with a dot."""
    rows = [line[10:] for line in chart.splitlines()[1:-2]]
    width = max(map(len, rows))
    rows = [row.ljust(width, "\u2800") for row in rows]
    return [next(i for i, row in enumerate(rows) if row[column] not in " \u2800") for column in range(width)]


@pytest.mark.parametrize("count", [2, 5, 100, 5000])
def test_a_falling_loss_falls_from_corner_to_corner(tmp_path: Path, count: int) -> None:
    chart = render(write(tmp_path, [8 - 6 * i / (count - 1) for i in range(count)]), 60, 16)
    lines = chart.splitlines()
    assert len(lines) == 16 and max(map(len, lines)) <= 60
    assert lines[0].startswith("loss 8 -> 2")
    highest, middle, lowest = (float(line.split()[0]) for line in (lines[1], lines[7], lines[-3]))
    # 5000 steps are drawn as means of 50.
    assert (highest, middle, lowest) == pytest.approx((8, 5, 2), abs=0.04)
    assert lines[-1].split() == ["step", "0", str(count - 1)]
    assert heights(chart) == sorted(heights(chart))
    assert (heights(chart)[0], heights(chart)[-1]) == (0, 12)


def test_a_spike_stays_one_line(tmp_path: Path) -> None:
    chart = render(write(tmp_path, [1.0] * 20 + [9.0] + [1.0] * 20), 60, 15)
    assert min(heights(chart)) == 0
    # The line up to the spike leaves no gap: each row has a dot.
    assert all(set(line[10:]) - {"\u2800"} for line in chart.splitlines()[1:-2])


def test_odd_files(tmp_path: Path) -> None:
    assert "no losses" in render(write(tmp_path, []))
    assert "3.000" in render(write(tmp_path, [3.0]))
    assert "loss 3 -> 3" in render(write(tmp_path, [3.0, 3.0]))
    # A resumed run repeats a step; a diverged one has NaN; a killed one half a line.
    chart = render(
        write(tmp_path, [5.0, 4.0, 9.0], '{"step": 2, "loss": 3.0}\n{"step": 3, "loss": NaN}\n{"step": 4, "lo')
    )
    assert "loss 5 -> 3" in chart and "9" not in chart.splitlines()[1]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, [5.0, 4.0])
    assert main([str(tmp_path)]) == 0
    first = capsys.readouterr().out
    assert main([str(path)]) == 0
    assert capsys.readouterr().out == first
    assert main([str(tmp_path / "nothing")]) == 1
    assert "no such file" in capsys.readouterr().err
