"""Sends and receives of a lowered plan: the right tensors between the right ranks, each once, in matching order.

The order on a link matters because a carrier matches by order and not by name: NCCL would hand over the wrong tensor
without an error.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from slimpipe.schedule.action import Action, Op
from slimpipe.schedule.excerpt import refusal
from slimpipe.schedule.plan import Plan
from slimpipe.schedule.transfers import Link, Tensor, carried, ends, link_of, receive_before


class _Posted(NamedTuple):
    rank: int
    at: int
    tensor: Tensor


def prove_transfers(plan: Plan) -> None:
    """Raises PlanError at the first transfer that is wrong, missing, twice, too early, too late or out of order."""
    sends: defaultdict[Link, list[_Posted]] = defaultdict(list)
    receives: defaultdict[Link, list[_Posted]] = defaultdict(list)
    for rank in range(plan.shape.p):
        _walk(plan, rank, sends, receives)
    _prove_matched(plan, sends, receives)
    for link, sent in sends.items():
        for here, there in zip(sent, receives[link], strict=True):
            if here.tensor != there.tensor:
                token = plan.ranks[there.rank][there.at]
                raise refusal(
                    plan,
                    here.rank,
                    here.at,
                    f"sends and receives of link {link} are in different orders: here goes the {here.tensor}, where "
                    f"rank {there.rank}, action {there.at} ({token}) expects the {there.tensor}",
                )


def _walk(plan: Plan, rank: int, sends: dict[Link, list[_Posted]], receives: dict[Link, list[_Posted]]) -> None:
    """One rank's list: transfers name their tensor's own ends, sends follow and receives precede their compute."""
    done: set[Action] = set()
    posted: dict[Action, int] = {}
    for index, action in enumerate(plan.ranks[rank]):
        if action.op.is_compute:
            receive = receive_before(plan.shape, rank, action)
            if receive is not None and receive not in posted:
                raise refusal(plan, rank, index, f"expected {receive} before it, to receive its input")
            done.add(action)
        if not action.op.is_transfer:
            continue
        tensor = carried(plan.shape, rank, action)
        if tensor is None:
            raise refusal(plan, rank, index, "no such tensor: the unit's stage is at the pipeline's end")
        src, dst = ends(plan.shape, tensor)
        peer = dst if action.op.is_send else src
        if action.peer != peer or peer == rank:
            raise refusal(plan, rank, index, f"the {tensor} goes from rank {src} to rank {dst}")
        if action in posted:
            raise refusal(
                plan, rank, index, f"expected each transfer once, but action {posted[action]} is {action} too"
            )
        posted[action] = index
        link = link_of(rank, action)
        if action.op.is_send:
            compute = Action(Op.FORWARD if link.kind == "F" else Op.BACKWARD, action.unit)
            if compute not in done:
                raise refusal(plan, rank, index, f"expected {compute} before it, which makes what it sends")
            sends[link].append(_Posted(rank, index, tensor))
        else:
            receives[link].append(_Posted(rank, index, tensor))


def _prove_matched(plan: Plan, sends: dict[Link, list[_Posted]], receives: dict[Link, list[_Posted]]) -> None:
    for ours, theirs, missing in ((sends, receives, "receives"), (receives, sends, "sends")):
        for link, posts in ours.items():
            known = {post.tensor for post in theirs.get(link, ())}
            for post in posts:
                if post.tensor not in known:
                    peer = link.dst if missing == "receives" else link.src
                    raise refusal(plan, post.rank, post.at, f"rank {peer} never {missing} the {post.tensor}")
