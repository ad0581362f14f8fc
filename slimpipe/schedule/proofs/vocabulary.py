"""Vocabulary passes: each once on every rank, in an order that can run, and collectives in one order on all ranks.

NCCL runs a communicator's operations in the order of posting and does not compare them: where the orders of two ranks
differ they hang, or add up what does not belong together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from slimpipe.schedule.action import Action, Op, Unit
from slimpipe.schedule.collectives import (
    COMMUNICATORS,
    Collective,
    Communicator,
    awaited_by,
    chunk_of,
    passes_of,
    posted_by,
    poster,
    sends_output_of,
)
from slimpipe.schedule.excerpt import refusal
from slimpipe.schedule.plan import Plan


def prove_vocabulary(plan: Plan, forward_only: bool = False) -> None:
    """Raises PlanError at the first pass that is wrong, missing, twice, too early, too late or out of order."""
    for rank in range(plan.shape.p):
        _walk(plan, rank, passes_of(forward_only))
    for communicator in COMMUNICATORS:
        _prove_same_order(plan, communicator, [_Posts.of(plan, rank, communicator) for rank in range(plan.shape.p)])


def _walk(plan: Plan, rank: int, passes: Sequence[Op]) -> None:
    """One rank's list: every pass once, behind what it needs and before what needs it. Relies on `proofs.units`."""
    shape = plan.shape
    done: dict[Action, int] = {}
    for index, action in enumerate(plan.ranks[rank]):
        if action.op.is_vocabulary:
            if action.op not in passes:
                raise refusal(plan, rank, index, f"expected passes {', '.join(op.value for op in passes)} alone")
            chunk = chunk_of(shape, action.op)
            if action.unit.chunk != chunk:
                raise refusal(plan, rank, index, f"expected chunk {chunk} in {action.op.value}, on whichever rank")
            if action in done:
                raise refusal(plan, rank, index, f"expected each pass once, but action {done[action]} is {action} too")
        elif not action.op.is_compute:
            continue
        for needed in _needed(plan, rank, action):
            if needed not in done:
                raise refusal(plan, rank, index, f"expected {needed} before it")
        done[action] = index
    for microbatch in range(shape.m):
        for slice_ in range(shape.n):
            for op in passes:
                expected = Action(op, Unit(microbatch, slice_, chunk_of(shape, op)))
                if expected not in done:
                    end = len(plan.ranks[rank])
                    raise refusal(plan, rank, end, f"{expected} is missing: expected each pass once on every rank")


def _needed(plan: Plan, rank: int, action: Action) -> Iterator[Action]:
    """Actions of the same rank that must come first: what posts the collective it waits for; what makes its data."""
    collective = awaited_by(plan.shape, rank, action)
    if collective is not None:
        yield poster(plan.shape, collective)
    source = sends_output_of(plan.shape, rank, action)
    if source is not None:
        yield source


def _prove_same_order(plan: Plan, communicator: Communicator, orders: Sequence[_Posts]) -> None:
    # The majority is taken to be right, so that the message names the rank that is not.
    common = Counter(order.collectives for order in orders).most_common(1)[0][0]
    model = next(order for order in orders if order.collectives == common)
    for order in orders:
        if order.collectives == common:
            continue
        places = zip(order.at, order.collectives, model.at, common, strict=True)
        here, found, there, expected = next(place for place in places if place[1] != place[3])
        token = plan.ranks[model.rank][there]
        raise refusal(
            plan,
            order.rank,
            here,
            f"ranks post the collectives of communicator {communicator} in different orders: here goes the "
            f"{found}, where rank {model.rank}, action {there} ({token}) has the {expected}",
        )


class _Posts(NamedTuple):
    """What a rank posts on one communicator, and where in its list."""

    rank: int
    at: tuple[int, ...]
    collectives: tuple[Collective, ...]

    @classmethod
    def of(cls, plan: Plan, rank: int, communicator: Communicator) -> _Posts:
        posts = [(index, posted_by(action)) for index, action in enumerate(plan.ranks[rank]) if action.op.is_vocabulary]
        here = [(index, post) for index, post in posts if post is not None and post.communicator == communicator]
        return cls(rank, tuple(index for index, _ in here), tuple(post for _, post in here))
