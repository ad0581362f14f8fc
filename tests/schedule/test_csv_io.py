"""CSV: exact round trips, and errors that name the line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimpipe.schedule import Plan, PlanError, Shape, build, from_csv, lower, to_csv
from tests.schedule.shapes import Case, supported_cases

TEXT = "schedule,p,v,n,m\n1f1b,2,1,1,2\n0,F0.0@0,F1.0@0,B0.0@0,B1.0@0\n1,F0.0@0,B0.0@0,F1.0@0,B1.0@0\n"


def test_by_hand() -> None:
    plan = build("1f1b", Shape(p=2, m=2))
    assert to_csv(plan) == TEXT
    assert from_csv(TEXT) == plan


@given(supported_cases(), st.booleans())
def test_round_trip(case: Case, with_transfers: bool) -> None:
    plan = build(*case)
    plan = lower(plan) if with_transfers else plan
    text = to_csv(plan)
    assert from_csv(text) == plan
    assert to_csv(from_csv(text)) == text


def test_empty_lists_round_trip() -> None:
    plan = Plan("x", Shape(2), ((), ()))
    assert from_csv(to_csv(plan)) == plan


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("schedule,p", "plan,p", "line 1: expected 'schedule,p,v,n,m'"),
        (TEXT, "", "line 1"),
        (TEXT, "schedule,p,v,n,m", "line 2: expected the schedule's name and shape, found the end"),
        ("1f1b,2,1,1,2", "1f1b,2,1,1", "line 2: expected four numbers"),
        ("1f1b,2,1,1,2", "1f1b,2,1,1,02", "line 2: expected four numbers"),
        ("1f1b,2,1,1,2", "1f1b,0,1,1,2", "line 2: p = 0"),
        ("1f1b,2", " 1f1b,2", "line 2: schedule name"),
        ("1f1b,2,", "1f1b,3,", "line 5: expected a line for each of p = 3 ranks"),
        ("1f1b,2,", "1f1b,1,", "line 4: expected the end after 1 ranks"),
        ("B1.0@0\n1", "B1.0@0\n\n1", "line 5: expected the end"),
        ("\n0,F0.0", "\n2,F0.0", "line 3: expected rank 0 first, found '2'"),
        ("\n1,F0.0", "\n01,F0.0", "line 4: expected rank 1 first, found '01'"),
        ("1,F0.0@0", "1,F0.0", "line 4: action token 'F0.0'"),
        ("0,F0.0@0", "0, F0.0@0", "line 3: action token ' F0.0@0'"),
        ("B1.0@0\n1,", "B1.0@0,\n1,", "line 3: action token ''"),
        ("0\n1,", "0\r\n1,", r"line 3: action token 'B1.0@0\r'"),
    ],
)
def test_errors_name_the_line(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(PlanError) as error:
        from_csv(TEXT.replace(old, new, 1))
    assert message in str(error.value)


def test_text_after_the_end_is_refused() -> None:
    for extra in ("x", "\n", "2,F0.0@0\n"):
        with pytest.raises(PlanError, match="line 5: expected the end"):
            from_csv(TEXT + extra)
    with pytest.raises(PlanError, match="each ended"):
        from_csv(TEXT[:-1])


def test_names_that_would_not_read_back_are_refused() -> None:
    for name in ("", "a,b", "a\nb", "a b", "\u00e9"):
        with pytest.raises(PlanError, match="schedule name"):
            to_csv(Plan(name, Shape(1), ((),)))
