"""The pipeline's loss, gradients and counted memory against one plain process, over every supported layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from slimpipe.schedule import check, equal_costs, simulate
from slimpipe.train.planning import make_plan
from slimpipe.train.session import Session
from tests.numerics.harness import (
    RankReport,
    batch_of,
    case,
    config_of,
    discrepancies,
    report,
    report_gradients,
    run_case,
)
from tests.numerics.in_order import in_threads
from tests.numerics.mutations import MUTATIONS
from tests.support.cover import Case, all_supported
from tests.support.pool import Pool


@pytest.mark.parametrize("case", all_supported(), ids=str)
def test_loss_and_every_gradient_equal_the_plain_process(
    case: Case, reports: Callable[[Case], list[RankReport]]
) -> None:
    assert discrepancies(case, reports(case)) == []


@pytest.mark.parametrize("case", all_supported(), ids=str)
def test_units_and_kv_slots_counted_are_the_simulators(case: Case, reports: Callable[[Case], list[RankReport]]) -> None:
    plan = make_plan(config_of(case)).plan
    peaks = check(plan)
    counted_units = [report.peak_units for report in reports(case)]
    assert counted_units == list(simulate(plan, equal_costs()).peak_units) == list(peaks.units)
    assert counted_units == [units_by_formula(case, rank) for rank in range(case.pp)]
    assert [report.peak_kv_slots for report in reports(case)] == list(peaks.kv_slots)
    if case.v == 1:
        assert [slots for (slots,) in peaks.kv_slots] == counted_units


def units_by_formula(case: Case, r: int) -> int:
    """n v + 2 (p-1-r) and, for the microbatch schedules, Megatron's warm-up and one more; never above all units."""
    p, v, n, m = case.pp, case.v, case.n, case.m
    most = {
        "slimpipe": n * v + 2 * (p - 1 - r),
        "interleaved": 2 * (p - 1 - r) + (v - 1) * p + 1,
        "1f1b": p - r,
        "gpipe": m,
    }
    return min(most[case.schedule], m * n * v)


@pytest.mark.parametrize("case", [case for case in all_supported() if case.pp > 1 and case.m != 2], ids=str)
def test_the_in_order_transport_gives_the_same(
    case: Case, pool: Callable[[int], Pool], reports: Callable[[Case], list[RankReport]]
) -> None:
    """Plans once more on NCCL's rule, to the bit: every p, v and n with one microbatch and with four. That no plan of
    any m breaks the rule is for tests/schedule/test_in_order.py."""
    (threads,) = pool(1).run(in_threads, case)
    assert sum(report.loss for report in threads) == reports(case)[0].loss
    if case.tied:
        first, last = (threads[rank].gradients for rank in (0, -1))
        first["embedding.weight"] = last["embedding.weight"] = first["embedding.weight"] + last["embedding.weight"]
    for ours, theirs in zip(threads, reports(case), strict=True):
        assert ours.gradients.keys() == theirs.gradients.keys()
        assert all(torch.equal(ours.gradients[name], theirs.gradients[name]) for name in ours.gradients)
        assert (ours.peak_units, ours.peak_kv_slots) == (theirs.peak_units, theirs.peak_kv_slots)


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


def test_a_run_without_a_process_group_is_the_plain_run(pool: Callable[[int], Pool]) -> None:
    plain = case(n=4, m=2, mask="ragged", tied=True)
    (grouped,) = run_case(pool, plain)
    alone = report_gradients(0, 1, plain, None)
    assert alone.loss == grouped.loss
    assert all(torch.equal(alone.gradients[name], grouped.gradients[name]) for name in grouped.gradients)


def test_a_second_step_forgets_the_first(pool: Callable[[int], Pool]) -> None:
    """Gradients, KV slots and their accumulators start anew: another batch in between leaves no trace."""
    for layout in (case(pp=2, n=4, m=2), case(pp=2, v=2, n=2, m=4, tied=True)):
        for first, second in pool(2).run(step_twice, layout):
            assert first.loss == second.loss
            assert all(torch.equal(first.gradients[name], second.gradients[name]) for name in first.gradients)
            assert (first.peak_units, first.peak_kv_slots) == (second.peak_units, second.peak_kv_slots)


def step_twice(rank: int, world: int, case: Case) -> tuple[RankReport, RankReport]:
    session = Session(config_of(case))
    tokens, labels = batch_of(case)
    first = report(session, session.step_gradients(tokens, labels))
    session.step_gradients(tokens.flip(1), labels.flip(1))
    return first, report(session, session.step_gradients(tokens, labels))


def test_a_batch_without_a_valid_token_is_refused() -> None:
    session = Session(config_of(case()))
    tokens, labels = batch_of(case())
    with pytest.raises(ValueError, match="masked"):
        session.step_gradients(tokens, torch.full_like(labels, -100))
