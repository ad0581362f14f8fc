"""The transfer pass: adds sends and receives to a plan of forwards and backwards (docs/architecture.md).

A send follows the compute that makes its tensor at once. A receive is posted a few compute actions ahead of the one
that consumes it: early enough to overlap, and late enough that little is outstanding (a cold process that posted
four ahead hung for good; docs/h200.md). Carriers match the transfers of a link by order, so a link's receives are
posted in its sender's order whatever order the receiver consumes in. Vocabulary passes between two computes stay where
they are, behind the sends and receives that stand there: a pass may wait, and what others wait for goes first.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from slimpipe.schedule.action import Action
from slimpipe.schedule.excerpt import refusal
from slimpipe.schedule.plan import Plan, PlanError
from slimpipe.schedule.transfers import Link, Tensor, carried, link_of, receive_before, send_after


def lower(plan: Plan, lookahead: int = 2) -> Plan:
    """The plan with SF, RF, SB and RB actions. Between a receive and its consumer lie at most `lookahead` computes.

    Raises PlanError where the plan has transfers already, and where a link's sender makes tensors in an order that no
    receives within `lookahead` of their consumers can follow.
    """
    if lookahead < 0:
        raise PlanError(f"lookahead = {lookahead}: must be at least 0")
    if plan.is_lowered:
        raise PlanError(f"{plan.name}: has sends and receives already")
    sent = _sent(plan)
    return Plan(plan.name, plan.shape, tuple(_lower_rank(plan, rank, lookahead, sent) for rank in range(plan.shape.p)))


class _Receive(NamedTuple):
    action: Action
    tensor: Tensor
    consumer: int


def _sent(plan: Plan) -> dict[Tensor, int]:
    """Each sent tensor's place among its sender's computes."""
    places: dict[Tensor, int] = {}
    for rank in range(plan.shape.p):
        for index, compute in enumerate(plan.compute(rank)):
            send = send_after(plan.shape, rank, compute)
            if send is not None:
                places[_tensor(plan, rank, send)] = index
    return places


def _lower_rank(plan: Plan, rank: int, lookahead: int, sent: dict[Tensor, int]) -> tuple[Action, ...]:
    receives = _receives_before(plan, rank, lookahead, sent)
    lowered = receives[0]
    done = 0
    for action in plan.ranks[rank]:
        lowered.append(action)
        if not action.op.is_compute:
            continue
        send = send_after(plan.shape, rank, action)
        if send is not None:
            lowered.append(send)
        done += 1
        lowered += receives[done]
    return tuple(lowered)


def _receives_before(plan: Plan, rank: int, lookahead: int, sent: dict[Tensor, int]) -> dict[int, list[Action]]:
    """The receives to post between the computes of a rank's list, by how many have been done."""
    by_link: defaultdict[Link, list[_Receive]] = defaultdict(list)
    for consumer, compute in enumerate(plan.compute(rank)):
        action = receive_before(plan.shape, rank, compute)
        if action is not None:
            tensor = _tensor(plan, rank, action)
            if tensor not in sent:
                raise refusal(plan, rank, plan.ranks[rank].index(compute), f"no rank makes the {tensor}")
            by_link[link_of(rank, action)].append(_Receive(action, tensor, consumer))
    posts: list[tuple[int, int, Action]] = []
    for receives in by_link.values():
        receives.sort(key=lambda receive: sent[receive.tensor])
        place = due = 0
        for receive in receives:
            # As early as the lookahead allows, but never before the receive of what the link carries first: the least
            # places that keep its order. So where one comes out behind its consumer, no other choice would do.
            place = max(place, receive.consumer - lookahead)
            due = max(due, receive.consumer)
            if place > receive.consumer:
                raise refusal(
                    plan,
                    rank,
                    plan.ranks[rank].index(plan.compute(rank)[receive.consumer]),
                    f"its sender sends other tensors of link {link_of(rank, receive.action)} first that are consumed "
                    f"here more than lookahead = {lookahead} actions later; raise the lookahead",
                )
            posts.append((place, due, receive.action))
    before: defaultdict[int, list[Action]] = defaultdict(list)
    # Among receives posted together, by when they are due; the sort is stable, so a link keeps its order.
    for place, _, action in sorted(posts, key=lambda post: post[:2]):
        before[place].append(action)
    return before


def _tensor(plan: Plan, rank: int, transfer: Action) -> Tensor:
    tensor = carried(plan.shape, rank, transfer)
    assert tensor is not None
    return tensor
