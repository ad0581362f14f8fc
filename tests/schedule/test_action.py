"""Tokens: what prints parses back, and nothing else parses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimpipe.schedule import Action, Op, Plan, PlanError, Shape, Unit

UNITS = st.builds(Unit, st.integers(0, 999), st.integers(0, 999), st.integers(0, 99))
WITH_PEER = [op for op in Op if op.is_transfer or op.is_help]
PASS = st.builds(Action, st.sampled_from([op for op in Op if op not in WITH_PEER]), UNITS, st.none())
TRANSFER = st.builds(Action, st.sampled_from(WITH_PEER), UNITS, st.integers(0, 999))


@given(st.one_of(PASS, TRANSFER))
def test_token_round_trips(action: Action) -> None:
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    ("token", "action"),
    [
        ("F3.12@0", Action(Op.FORWARD, Unit(3, 12, 0))),
        ("B0.0@2", Action(Op.BACKWARD, Unit(0, 0, 2))),
        ("SF3.12@0>1", Action(Op.SEND_FORWARD, Unit(3, 12, 0), 1)),
        ("XF3.12@0<2", Action(Op.HELP_FORWARD, Unit(3, 12, 0), 2)),
        ("XB3.12@0<2", Action(Op.HELP_BACKWARD, Unit(3, 12, 0), 2)),
        ("RB3.12@0<1", Action(Op.RECV_BACKWARD, Unit(3, 12, 0), 1)),
    ],
)
def test_token_means(token: str, action: Action) -> None:
    assert Action.parse(token) == action
    assert str(action) == token


@pytest.mark.parametrize(
    "token",
    [
        "",
        "0F2.1",
        "0F2.1@0",
        "F1.2",
        "F1@0",
        "F01.2@0",
        "F1.02@0",
        "F1.2@00",
        "F-1.2@0",
        "F1.2@0 ",
        " F1.2@0",
        "F1.2@0\n",
        "f1.2@0",
        "I1.2@0",
        "FF1.2@0",
        "F1.2@0>1",
        "B1.2@0<1",
        "SF1.2@0",
        "SF1.2@0<1",
        "RF1.2@0>1",
        "SB1.2@0>01",
        "SB1.2@0>",
        "F1,2@0",
        "F1.2.3@0",
        "F\u0661.2@0",
        "F\u00b2.2@0",
    ],
)
def test_token_refused(token: str) -> None:
    with pytest.raises(ValueError, match="action"):
        Action.parse(token)


def test_a_transfer_needs_a_peer_and_compute_has_none() -> None:
    with pytest.raises(ValueError, match="peer"):
        Action(Op.SEND_FORWARD, Unit(0, 0, 0))
    with pytest.raises(ValueError, match="peer"):
        Action(Op.FORWARD, Unit(0, 0, 0), 1)


def test_shape_refuses_less_than_one() -> None:
    for name in "pvnm":
        with pytest.raises(PlanError, match=f"{name} = 0"):
            Shape(**{"p": 1, "v": 1, "n": 1, "m": 1, name: 0})


def test_producer_is_the_neighbouring_stage() -> None:
    plan = Plan("x", Shape(p=3, v=2), ((), (), ()))
    unit = Unit(0, 0, 0)
    assert plan.producer(0, Action(Op.FORWARD, unit)) is None
    assert plan.producer(1, Action(Op.FORWARD, unit)) == (0, unit)
    assert plan.producer(0, Action(Op.FORWARD, Unit(0, 0, 1))) == (2, unit)
    assert plan.producer(2, Action(Op.BACKWARD, unit)) == (0, Unit(0, 0, 1))
    assert plan.producer(2, Action(Op.BACKWARD, Unit(0, 0, 1))) is None
