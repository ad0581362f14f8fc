"""120 steps of what `python -m benchmarks.swap_long` does for 5,000 (benchmarks/results/swap_long.jsonl)."""

from __future__ import annotations

import pytest

from benchmarks.swap_long import run


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_the_same_loss_curve_and_nothing_that_grows(kind: str) -> None:
    row = run(kind, 120)
    assert row["losses_equal"] and row["faults"] == 0
    assert row["moved_out_bytes"] > 0 and row["planned_share"] > 0.7 and row["late_share"] < 0.02
    assert row["most_of_budget"] < 1.05  # a step's largest tensor is 14 % of the budget
    assert row["last_loss"] < 0.5 * row["first_loss"]  # it does learn
    early, late = row["early"], row["late"]
    for key in ("host_bytes_in_use", "saved", "known", "releases", "retired", "away_bytes", "holders"):
        assert late[key] == 0, key
    assert late["host_bytes_pinned"] <= 2 * early["host_bytes_pinned"]
    assert late["device_bytes_in_use"] == early["device_bytes_in_use"]
    assert late["kinds_of_step"] <= 16
