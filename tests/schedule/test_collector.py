"""The garbage collector is off while a plan is made, and afterwards as it was."""

from __future__ import annotations

import gc

import pytest

from slimpipe.schedule import PlanError, collector_paused


@pytest.mark.parametrize("before", [True, False])
def test_it_is_as_before_even_behind_an_error(before: bool) -> None:
    @collector_paused()
    def refused() -> None:
        assert not gc.isenabled()
        with collector_paused():
            pass
        assert not gc.isenabled()
        raise PlanError("no plan")

    enabled = gc.isenabled()
    try:
        (gc.enable if before else gc.disable)()
        for _ in range(2):
            with pytest.raises(PlanError):
                refused()
            assert gc.isenabled() == before
    finally:
        (gc.enable if enabled else gc.disable)()
