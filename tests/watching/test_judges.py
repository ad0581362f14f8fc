"""Loss spikes and ranks that stand out: what is told, and what is not."""

from __future__ import annotations

import math
import random

import pytest

from slimpipe.train.outliers import Outliers
from slimpipe.train.spikes import Spikes

GIB = 2**30


def losses(count: int, seed: int = 0) -> list[float]:
    """A run's: falling, with noise."""
    noise = random.Random(seed)
    return [3 + 2 * math.exp(-step / 200) + noise.gauss(0, 0.05) for step in range(count)]


def test_a_run_without_spikes_is_told_nothing_of() -> None:
    for seed in range(20):
        spikes = Spikes(50, 8.0)
        assert [said for loss in losses(500, seed) if (said := spikes.see(loss))] == []


def test_a_spike_is_told_with_its_height_and_moves_no_threshold() -> None:
    spikes = Spikes(50, 8.0)
    for loss in losses(300):
        assert spikes.see(loss) is None
    said = spikes.see(9.0)
    assert said is not None and said.startswith("loss spike: 9.0000 is ")
    assert said.endswith("the median of the last 50 steps (log.spike_threshold 8)")
    # By mean and deviation the second would hide behind the first.
    assert spikes.see(3.5) is None and spikes.see(9.0) is not None


def test_deviations_are_those_of_a_normal_distribution() -> None:
    """Of 0 .. 9 and one that is far out: median 5, median absolute deviation 3."""
    spikes = Spikes(11, 0.5)
    for value in (1000, 0, 9, 1, 8, 2, 7, 3, 6, 4, 5):
        spikes.see(float(value))
    said = spikes.see(5 + 2 * 1.4826 * 3)
    assert said is not None and "is 2.0 deviations above 5.0000" in said


@pytest.mark.parametrize("few", [0, 5, 9])
def test_nothing_is_called_a_spike_before_there_is_something_to_compare_with(few: int) -> None:
    spikes = Spikes(50, 8.0)
    for loss in losses(few):
        spikes.see(loss)
    assert spikes.see(100.0) is None


def test_losses_that_stand_still_or_are_not_finite_or_are_not_watched() -> None:
    spikes = Spikes(20, 8.0)
    for _ in range(20):
        assert spikes.see(2.0) is None
    assert spikes.see(2.0 + 1e-6) is None and spikes.see(float("nan")) is None
    assert spikes.see(2.1) is not None
    off = Spikes(20, None)
    assert not any(off.see(loss) for loss in [*losses(30), 1e9])


# ---- ranks ----


def judge(ranks: int = 4, threshold: float | None = 1.5) -> Outliers:
    """Ranks of unequal work and memory, as by plan."""
    return Outliers(5, threshold, [4.0 + rank for rank in range(ranks)], [(20 - rank) * GIB for rank in range(ranks)])


def window(
    outliers: Outliers, pace: dict[int, float] | None = None, more: dict[int, float] | None = None, ranks: int = 4
) -> list[str]:
    """What is said over a window of steps; `pace` of ranks beside the usual one, `more` GiB beside the prediction."""
    busy = [(4.0 + rank) * 0.1 * (pace or {}).get(rank, 1.0) for rank in range(ranks)]
    peaks = [int((20 - rank + 1.5 + (more or {}).get(rank, 0.0)) * GIB) for rank in range(ranks)]
    return [said for _ in range(5) for said in outliers.see(busy, peaks)]


def test_ranks_that_differ_as_planned_are_no_outliers() -> None:
    outliers = judge()
    assert window(outliers) == [] and window(outliers, {1: 1.4}, {0: 5.0}) == []


def test_a_slow_rank_is_named_once_and_again_when_it_is_over() -> None:
    outliers = judge()
    (said,) = window(outliers, {2: 1.8})
    assert said == (
        "rank 2 is slow: its compute takes 1.80 times what its share of the work takes elsewhere (median of 5 steps; "
        "log.outlier_threshold 1.5)"
    )
    assert window(outliers, {2: 1.7}) == []
    (over,) = window(outliers)
    assert over.startswith("rank 2 is slow no longer: its compute takes 1.00 times")


def test_one_slow_step_of_a_window_is_none() -> None:
    outliers = judge()
    said = outliers.see([0.4, 0.5, 6.0, 0.7], [GIB] * 4)
    for _ in range(4):
        said += outliers.see([0.4, 0.5, 0.6, 0.7], [GIB] * 4)
    assert [line for line in said if "slow" in line] == []


def test_a_full_rank_is_named_by_what_its_prediction_leaves() -> None:
    (said,) = window(judge(), more={3: 12.0})
    assert said.startswith("rank 3 uses more memory than the others explain: 30.50 GiB, 12.00 GiB more beyond")


@pytest.mark.parametrize(("ranks", "threshold"), [(1, 1.5), (4, None)])
def test_one_rank_has_nobody_beside_it_and_null_asks_for_silence(ranks: int, threshold: float | None) -> None:
    assert window(judge(ranks, threshold), {0: 9.0}, {0: 99.0}, ranks) == []


def test_of_two_ranks_the_slower_is_named() -> None:
    for slow in (0, 1):
        (said,) = window(judge(2), {slow: 2.0}, ranks=2)
        assert said.startswith(f"rank {slow} is slow")
