"""Sends and receives: where they stand in a rank's list, and which there are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimpipe.schedule import Action, Link, Op, Plan, PlanError, Shape, build, check, links, lower
from slimpipe.schedule.transfers import link_of, receive_before, send_after
from tests.schedule.shapes import Case, supported_cases


def tokens(plan: Plan, rank: int) -> str:
    return " ".join(map(str, plan.ranks[rank]))


def test_by_hand() -> None:
    """1f1b, p = 2, m = 3: sends right after their compute, receives two computes ahead, the first ones at the start."""
    plan = lower(build("1f1b", Shape(p=2, m=3)), lookahead=2)
    assert tokens(plan, 0) == (
        "RB0.0@0<1 F0.0@0 SF0.0@0>1 F1.0@0 SF1.0@0>1 RB1.0@0<1 B0.0@0 RB2.0@0<1 F2.0@0 SF2.0@0>1 B1.0@0 B2.0@0"
    )
    assert tokens(plan, 1) == (
        "RF0.0@0<0 RF1.0@0<0 F0.0@0 B0.0@0 SB0.0@0>0 RF2.0@0<0 F1.0@0 B1.0@0 SB1.0@0>0 F2.0@0 B2.0@0 SB2.0@0>0"
    )


def test_lookahead_zero_posts_right_before_use() -> None:
    plan = lower(build("slimpipe", Shape(p=2, n=2, m=1)), lookahead=0)
    assert tokens(plan, 1) == "RF0.0@0<0 F0.0@0 RF0.1@0<0 F0.1@0 B0.1@0 SB0.1@0>0 B0.0@0 SB0.0@0>0"


def test_one_rank_sends_nothing() -> None:
    plan = build("slimpipe", Shape(p=1, v=3, n=4, m=2))
    assert lower(plan) == plan
    assert links(plan) == ()


@given(supported_cases(), st.integers(0, 4))
def test_lowering(case: Case, lookahead: int) -> None:
    plan = build(*case)
    lowered = lower(plan, lookahead)
    check(lowered)
    shape = plan.shape
    for rank, actions in enumerate(lowered.ranks):
        assert lowered.compute(rank) == plan.ranks[rank]
        done = 0
        posted: dict[Action, int] = {}
        for index, action in enumerate(actions):
            if action.op.is_recv:
                posted[action] = done
            if not action.op.is_compute:
                continue
            receive = receive_before(shape, rank, action)
            if receive is not None:
                # As early as the lookahead allows and no earlier: these orders consume a link's tensors as they come.
                assert posted.pop(receive) == max(0, done - lookahead)
            send = send_after(shape, rank, action)
            if send is not None:
                assert actions[index + 1] == send
            done += 1
        assert not posted


@given(supported_cases())
def test_links_are_those_that_the_lowered_plan_uses(case: Case) -> None:
    plan = build(*case)
    used = {
        link_of(rank, action)
        for rank, actions in enumerate(lower(plan).ranks)
        for action in actions
        if not action.op.is_compute
    }
    assert links(plan) == tuple(sorted(used)) == links(lower(plan))


def test_links_include_the_wrap() -> None:
    chain = (Link("B", 1, 0), Link("B", 2, 1), Link("F", 0, 1), Link("F", 1, 2))
    assert links(build("slimpipe", Shape(p=3, n=3, m=1))) == chain
    wrapped = links(build("slimpipe", Shape(p=3, v=2, n=3, m=1)))
    assert {Link("F", 2, 0), Link("B", 0, 2)} < set(wrapped)
    assert len(wrapped) == 6
    # With two ranks the wrap and the way back are links of different kinds between the same ranks.
    assert len(links(build("slimpipe", Shape(p=2, v=2, n=2, m=1)))) == 4


def crossed() -> Plan:
    """Rank 1 runs forwards of microbatches 1, 0; rank 0 makes 0, 1."""
    ranks = (
        "F0.0@0 F1.0@0 B1.0@0 B0.0@0",
        "F1.0@0 B1.0@0 F0.0@0 B0.0@0",
    )
    return Plan("crossed", Shape(p=2, m=2), tuple(tuple(map(Action.parse, rank.split())) for rank in ranks))


def test_receives_are_posted_in_the_senders_order() -> None:
    check(crossed())
    plan = lower(crossed(), lookahead=2)
    check(plan)
    receives = [str(action) for action in plan.ranks[1] if action.op is Op.RECV_FORWARD]
    assert receives == ["RF0.0@0<0", "RF1.0@0<0"]


def test_a_lookahead_too_short_for_the_senders_order_is_refused() -> None:
    with pytest.raises(PlanError, match=r"rank 1, action 0 \(F1.0@0\): .*lookahead = 1") as error:
        lower(crossed(), lookahead=1)
    assert ">F1.0@0<" in str(error.value)


def test_refusals() -> None:
    plan = build("1f1b", Shape(p=2, m=2))
    with pytest.raises(PlanError, match="lookahead = -1"):
        lower(plan, lookahead=-1)
    with pytest.raises(PlanError, match="already"):
        lower(lower(plan))
    with pytest.raises(PlanError, match="no rank makes the activation of microbatch 1, slice 0"):
        lower(Plan(plan.name, plan.shape, (plan.ranks[0][:1], plan.ranks[1])))
