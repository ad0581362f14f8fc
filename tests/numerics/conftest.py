"""Reports of the cases on the engine, shared by the tests that look at them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.numerics.harness import RankReport, run_case
from tests.support.cover import Case
from tests.support.pool import Pool


@pytest.fixture(scope="session")
def reports(pool: Callable[[int], Pool]) -> Callable[[Case], list[RankReport]]:
    """Each case's reports by rank; it runs once, however many tests look at them."""
    known: dict[Case, list[RankReport]] = {}

    def of(case: Case) -> list[RankReport]:
        if case not in known:
            known[case] = run_case(pool, case)
        return known[case]

    return of
