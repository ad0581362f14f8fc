"""The pipeline's loss, gradients and counted memory against one plain process, over every supported layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slimpipe.schedule import check, equal_costs, simulate
from slimpipe.train.session import make_plan
from tests.numerics.harness import RankReport, case, config_of, discrepancies, run_case
from tests.numerics.mutations import MUTATIONS
from tests.support.cover import Case, all_supported
from tests.support.pool import Pool


@pytest.fixture(scope="module")
def reports(pool: Callable[[int], Pool]) -> Callable[[Case], list[RankReport]]:
    """Each case's reports; it runs once, however many tests look at them."""
    known: dict[Case, list[RankReport]] = {}

    def of(case: Case) -> list[RankReport]:
        if case not in known:
            known[case] = run_case(pool, case)
        return known[case]

    return of


@pytest.mark.parametrize("case", all_supported(), ids=str)
def test_loss_and_every_gradient_equal_the_plain_process(
    case: Case, reports: Callable[[Case], list[RankReport]]
) -> None:
    assert discrepancies(case, reports(case)) == []


@pytest.mark.parametrize("case", all_supported(), ids=str)
def test_units_and_kv_slots_counted_are_the_simulators(case: Case, reports: Callable[[Case], list[RankReport]]) -> None:
    plan = make_plan(config_of(case))
    peaks = check(plan)
    counted_units = [report.peak_units for report in reports(case)]
    assert counted_units == list(simulate(plan, equal_costs()).peak_units) == list(peaks.units)
    assert counted_units == [units_by_formula(case, rank) for rank in range(case.pp)]
    assert [report.peak_kv_slots for report in reports(case)] == list(peaks.kv_slots)
    if case.v == 1:
        assert [slots for (slots,) in peaks.kv_slots] == counted_units


def units_by_formula(case: Case, r: int) -> int:
    """DESIGN.md section 2 and, for the microbatch schedules, Megatron's warm-up and one more; never above all units."""
    p, v, n, m = case.pp, case.v, case.n, case.m
    most = {
        "slimpipe": n * v + 2 * (p - 1 - r),
        "interleaved": 2 * (p - 1 - r) + (v - 1) * p + 1,
        "1f1b": p - r,
        "gpipe": m,
    }
    return min(most[case.schedule], m * n * v)


BROKEN = {
    name: case(pp=2, n=4, m=2, tied=name == "tied_gradients_are_not_summed", mask="ragged", micro_batch=2)
    for name in MUTATIONS
}
# One microbatch: with more, slots would run out before the gradients could be wrong.
BROKEN["backwards_in_ascending_order"] = case(pp=2, n=4, m=1)


@pytest.mark.parametrize("name", BROKEN)
def test_the_comparison_sees_a_deliberate_mistake(name: str, pool: Callable[[int], Pool]) -> None:
    assert discrepancies(BROKEN[name], run_case(pool, BROKEN[name], mutation=name)) != []


def test_the_cases_of_the_mistakes_are_right_without_them(pool: Callable[[int], Pool]) -> None:
    for sound in set(BROKEN.values()):
        assert discrepancies(sound, run_case(pool, sound)) == []
