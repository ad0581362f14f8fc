"""The papers' numbers, and idle shares worked out apart, from simulator and formulas alike."""

from __future__ import annotations

import pytest
from hypothesis import given

from slimpipe.schedule import (
    Shape,
    bubble_fraction,
    build,
    check,
    equal_costs,
    peak_activation,
    simulate,
    sliced_costs,
    supported,
)
from tests.schedule.shapes import Case, supported_cases

GIB_AT_64 = 25.157
"""M_a / 64 of Llama-13B at 256K."""


@pytest.mark.parametrize(
    ("name", "p", "n", "v", "m", "percent"),
    [
        ("slimpipe", 8, 16, 5, 8, 1.08),
        ("interleaved", 8, 1, 5, 8, 14.89),
        ("slimpipe", 16, 64, 5, 4, 1.16),
        ("slimpipe", 32, 64, 3, 4, 3.88),
        ("slimpipe", 28, 112, 2, 4, 2.93),
        ("slimpipe", 32, 128, 1, 4, 5.71),
    ],
)
def test_bubble_table(name: str, p: int, n: int, v: int, m: int, percent: float) -> None:
    shape = Shape(p, v, n, m)
    formula = bubble_fraction(name, shape)
    assert round(100 * float(formula), 2) == percent
    assert simulate(build(name, shape), equal_costs()).bubble_fraction == pytest.approx(float(formula), abs=1e-9)


@pytest.mark.parametrize(
    ("p", "n", "v", "ranks", "gib"),
    [
        (8, 16, 5, 64, 29.56),
        (8, 32, 5, 64, 27.36),
        (4, 16, 10, 64, 26.10),
        (4, 8, 10, 64, 27.04),
        (2, 4, 20, 32, 51.57),
        (8, 16, 5, 128, 14.78),
        (8, 32, 5, 128, 13.68),
    ],
)
def test_accumulated_activation_table(p: int, n: int, v: int, ranks: int, gib: float) -> None:
    """`ranks` = t c p share M_a, of which the pipeline's share is in `peak_activation` already."""
    shape = Shape(p, v, n, m=4)
    microbatch = GIB_AT_64 * 64 / (ranks / p)
    simulated = simulate(build("slimpipe", shape), equal_costs()).peak_activation
    # The table's last digit comes from an M_a that is itself printed to three decimals.
    assert simulated * microbatch == pytest.approx(gib, abs=0.006)
    assert float(peak_activation("slimpipe", shape)) == pytest.approx(simulated)


@pytest.mark.parametrize(
    ("name", "p", "v", "n", "m", "activation", "bubble"),
    [
        ("gpipe", 4, 1, 1, 8, 8 / 4, 3 / 11),
        ("gpipe", 8, 1, 1, 32, 32 / 8, 7 / 39),
        ("1f1b", 4, 1, 1, 8, 1.0, 3 / 11),
        ("1f1b", 8, 1, 1, 32, 1.0, 7 / 39),
        ("interleaved", 4, 2, 1, 8, 1 + 3 / (4 * 2), 3 / (2 * 8 + 3)),
        ("interleaved", 8, 5, 1, 16, 1 + 7 / (8 * 5), 7 / (5 * 16 + 7)),
        ("slimpipe", 4, 1, 16, 8, (1 + 2 * 3 / 16) / 4, 3 / (8 * 16 + 3)),
        ("slimpipe", 8, 5, 32, 4, (1 + 2 * 7 / (32 * 5)) / 8, 7 / (4 * 32 * 5 + 7)),
    ],
)
def test_scheme_table(name: str, p: int, v: int, n: int, m: int, activation: float, bubble: float) -> None:
    timeline = simulate(build(name, Shape(p, v, n, m)), equal_costs())
    assert timeline.peak_activation == pytest.approx(activation)
    assert timeline.bubble_fraction == pytest.approx(bubble)


@pytest.mark.parametrize(
    ("p", "n", "v", "m", "off", "equal"),
    [
        (4, 16, 1, 4, 16.4, 4.5),
        (8, 32, 1, 2, 21.6, 9.9),
        (8, 32, 1, 4, 17.8, 5.2),
        (16, 64, 1, 4, 18.5, 5.5),
        (8, 32, 5, 4, 8.8, 1.1),
        (2, 16, 1, 2, 8.5, 3.0),
    ],
)
def test_idle_share_without_exchange(p: int, n: int, v: int, m: int, off: float, equal: float) -> None:
    """Idle shares by a lockstep count made before this simulator, and by the formula, in per cent."""
    shape = Shape(p, v, n, m)
    timeline = simulate(build("slimpipe", shape), sliced_costs(n, attention_share=0.8))
    assert round(100 * timeline.bubble_fraction, 1) == off
    assert round(100 * float(bubble_fraction("slimpipe", shape)), 1) == equal


@given(supported_cases())
def test_simulator_agrees_with_the_formulas(case: Case) -> None:
    """Every schedule, every supported shape, m = 1 and n = 1 among them: no deadlock, and the published numbers."""
    name, shape = case
    timeline = simulate(build(name, shape), equal_costs())
    assert timeline.bubble_fraction == pytest.approx(float(bubble_fraction(name, shape)), abs=1e-9)
    assert timeline.peak_activation == pytest.approx(float(peak_activation(name, shape)))


def test_slimpipe_with_one_chunk_runs_every_shape() -> None:
    """p <= 8, n <= 16, m <= 8 (every other here): no deadlock, bubble equal to the formula."""
    for p in range(1, 9):
        for n in range(1, 17):
            for m in (1, 2, 3, 8):
                shape = Shape(p, 1, n, m)
                assert supported("slimpipe", shape) is None
                timeline = simulate(build("slimpipe", shape), equal_costs())
                assert timeline.bubble_fraction == pytest.approx(float(bubble_fraction("slimpipe", shape)), abs=1e-9)


def test_the_checker_counts_the_same_peak() -> None:
    shape = Shape(8, 5, 16, 4)
    assert max(check(build("slimpipe", shape)).units) == 16 * 5 + 2 * 7
