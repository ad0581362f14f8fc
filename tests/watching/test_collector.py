"""The garbage collector looks at what steps make, not at all that was there before."""

from __future__ import annotations

import contextlib
import gc
from unittest import mock

import pytest

from slimpipe.train import main
from slimpipe.train.collector import heap_set_aside
from tests.numerics.harness import case, config_of


class Cycle:
    def __init__(self) -> None:
        self.me = self


def cycles() -> int:
    return sum(type(thing) is Cycle for thing in gc.get_objects())


def test_what_was_there_is_collected_once_and_set_aside_until_the_end() -> None:
    kept, _ = Cycle(), Cycle()
    del _
    with heap_set_aside():
        assert gc.get_freeze_count() > 0 and cycles() == 0
        Cycle()
        assert cycles() == 1
        gc.collect()
        assert cycles() == 0
    assert gc.get_freeze_count() == 0 and cycles() == 1
    assert kept.me is kept


def test_an_error_ends_it_too() -> None:
    with pytest.raises(KeyError), heap_set_aside():
        raise KeyError
    assert gc.get_freeze_count() == 0


def test_the_steps_of_a_run_are_taken_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but what is around the steps is stood in for."""
    frozen: list[int] = []
    for name in ("_agree", "Saving", "Watchdog", "plan_swaps", "make_plan", "Forecast", "Session"):
        monkeypatch.setattr(main, name, mock.MagicMock())
    main.Saving.return_value.nothing_left = False  # type: ignore[attr-defined]
    monkeypatch.setattr(main, "_steps", lambda *_: frozen.append(gc.get_freeze_count()))
    processes, rest = mock.MagicMock(rank=1), [mock.MagicMock() for _ in range(4)]
    main._run(config_of(case()), *rest[:3], processes, rest[3], contextlib.nullcontext())  # type: ignore[arg-type]
    assert len(frozen) == 1 and frozen[0] > 0 and gc.get_freeze_count() == 0
