"""What loans send, in which order, and that no order of it can hang (docs/exchange.md)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slimpipe.schedule import (
    Action,
    Exchange,
    Mode,
    Plan,
    PlanError,
    Posting,
    Shape,
    add_vocabulary,
    least_send_window,
    lower,
    postings,
    replay_in_order,
)
from slimpipe.schedule import exchange_replay as replay
from tests.schedule.shapes import cases
from tests.schedule.test_check import edited
from tests.schedule.test_exchange import exchanged

PER_LOAN = {"F": 2 + 1 + 2, "B": 2 + 4 + 3}
"""Tensors of one loan in one layer: K, V; Q; out, LSE. K, V; Q, out, LSE, dOut; dQ, dK, dV."""


def test_by_hand() -> None:
    """p = 2, n = 3, m = 1: rank 0's idle F slot helps rank 1 with slice 2."""
    plan, exchange = exchanged(Shape(p=2, n=3, m=1))
    (help_,) = (action for action in plan.ranks[0] if str(action) == "XF0.2@0<1")
    helper = list(postings(exchange, 0, help_, layers=2))
    owner = list(postings(exchange, 1, Action.parse("F0.2@0"), layers=2))
    assert [(x.layer, x.batch) for x in owner] == [(layer, batch) for layer in range(2) for batch in "ABC"]
    assert [[piece.what for piece in x.sends] for x in owner[:3]] == [["K", "V"], ["Q"], []]
    assert [[piece.what for piece in x.receives] for x in owner[:3]] == [[], [], ["out", "LSE"]]
    for ours, theirs in zip(owner, helper, strict=True):
        assert (ours.sends, ours.receives) == (theirs.receives, theirs.sends)
    backward = [x for x in postings(exchange, 1, Action.parse("B0.2@0"), layers=1)]
    assert [[piece.what for piece in x.sends] for x in backward] == [["K", "V"], ["Q", "out", "LSE", "dOut"], []]
    assert [[piece.what for piece in x.receives] for x in backward] == [[], [], ["dQ", "dK", "dV"]]
    assert list(postings(exchange, 0, Action.parse("F0.0@0"), layers=1)) == []


def test_backwards_that_run_attention_again_by_hand() -> None:
    """The loan of the backward serves both: keys and values and the query travel once."""
    _, exchange = exchanged(Shape(p=2, n=3, m=1), again=True)
    found = list(postings(exchange, 1, Action.parse("B0.2@0"), layers=2))
    assert [(x.layer, x.batch) for x in found] == [
        (n, batch) for n in range(2) for batch in ("A", "B'", "C'", "B", "C")
    ]
    sends, receives = ([[p.what for p in getattr(x, way)] for x in found[:5]] for way in ("sends", "receives"))
    assert sends == [["K", "V"], ["Q"], [], ["out", "LSE", "dOut"], []]
    assert receives == [[], [], ["out", "LSE"], [], ["dQ", "dK", "dV"]]
    forward = postings(exchange, 1, Action.parse("F0.2@0"), layers=1)
    assert [x.batch for x in forward] == ["A", "B", "C"]


@pytest.mark.parametrize("mode", ["pairwise", "balanced"])
def test_runs_with_links_and_vocabulary(mode: Mode) -> None:
    """Every shape, with passes and without, under NCCL's rules, the loans on one communicator of all ranks."""
    loans = windows = 0
    for _, shape in cases([2, 4], [1, 2], [1, 3, 5, 8, 11], [1, 3], ["slimpipe"]):
        plan, exchange = exchanged(shape, mode)
        # Groups longer than the pipeline need room in the send buffers, with loans rather more of it.
        window = 1 if shape.v == 1 else least_send_window(lower(plan), exchange=exchange)
        windows += window > 1
        for full in (plan, add_vocabulary(plan, slots=exchange.slots)):
            for again in (False, True):
                loans_of = replace(exchange, again=again)
                report = replay_in_order(lower(full), send_window=window, exchange=loans_of, layers=2)
                extra = {"F": 0, "B": 2 * again}  # out and LSE of the forward, once more
                assert report.exchanged == sum(
                    2 * (PER_LOAN[k] + extra[k]) for k in (x.slot.kind for x in exchange.loans)
                )
        loans += len(exchange.loans)
    assert windows > 0
    assert loans > (500 if mode == "pairwise" else 2000)


@pytest.fixture(scope="module")
def lowered() -> tuple[Plan, Exchange]:
    plan, exchange = exchanged(Shape(p=3, n=6, m=2))
    return lower(plan), exchange


def test_without_a_helper_its_owner_hangs(lowered: tuple[Plan, Exchange]) -> None:
    plan, exchange = lowered
    rank, token = next((r, str(a)) for r, actions in enumerate(plan.ranks) for a in actions if a.op.is_help)
    with pytest.raises(PlanError, match=r"deadlock in order of posting: .*batch A of layer 0 of \S+ waits for ranks"):
        replay_in_order(edited(plan, rank, lambda tokens: tokens.remove(token)), exchange=exchange)


def test_ranks_that_meet_in_different_orders_hang_or_mix_up(
    lowered: tuple[Plan, Exchange], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were one rank to post the query before keys and values."""
    plan, exchange = lowered

    def swapped(exchange: Exchange, rank: int, action: Action, layers: int) -> list[Posting]:
        found = list(postings(exchange, rank, action, layers))
        if rank == 1:
            found[0:2] = found[1::-1]
        return found

    monkeypatch.setattr(replay, "postings", swapped)
    with pytest.raises(PlanError, match=r"exchange: the \w+ of layer 0, .* arrives where the \w+ of layer 0"):
        replay_in_order(plan, exchange=exchange)
