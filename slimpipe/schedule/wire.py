"""Links in the simulator: tensors of one link travel one after another, in the order of its sends.

A transfer starts when both sides have posted it and the link is free (NCCL's send and receive meet; neither side's
compute waits for the other). Its arrival is the event that the consuming action needs.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import NamedTuple

from slimpipe.schedule.action import Action
from slimpipe.schedule.costs import LinkCost
from slimpipe.schedule.flow import Flow, Rule
from slimpipe.schedule.plan import PlanError
from slimpipe.schedule.transfers import Link, Tensor, carried, link_of


class Transfer(NamedTuple):
    """A tensor's way over a link: sent from `start`, there at `end`."""

    link: Link
    tensor: Tensor
    start: float
    end: float


class Wires:
    """All links of a run. `cost` None: transfers take no time."""

    def __init__(self, cost: LinkCost | None) -> None:
        self.transfers: list[Transfer] = []
        self._holds = cost.holds if cost else 0.0
        self._latency = cost.latency if cost else 0.0
        self._free_at: defaultdict[Link, float] = defaultdict(float)
        self._sends: defaultdict[Link, deque[tuple[Tensor, float]]] = defaultdict(deque)
        self._receives: defaultdict[Link, deque[tuple[Tensor, float]]] = defaultdict(deque)

    def send(self, flow: Flow, link: Link, tensor: Tensor, time: float) -> None:
        self._sends[link].append((tensor, time))
        self._meet(flow, link)

    def receive(self, flow: Flow, link: Link, tensor: Tensor, time: float) -> None:
        self._receives[link].append((tensor, time))
        self._meet(flow, link)

    def carry(self, flow: Flow, link: Link, tensor: Tensor, time: float) -> None:
        """Send to a rank that waits with a receive: how a plan without transfer actions moves its tensors."""
        start = max(time, self._free_at[link])
        self._free_at[link] = start + self._holds
        end = start + self._holds + self._latency
        self.transfers.append(Transfer(link, tensor, start, end))
        flow.post(tensor, end)

    def _meet(self, flow: Flow, link: Link) -> None:
        sends, receives = self._sends[link], self._receives[link]
        while sends and receives:
            (sent, sent_at), (received, received_at) = sends.popleft(), receives.popleft()
            if sent != received:
                raise PlanError(f"link {link}: {sent} meets the receive of {received}; run schedule.check on the plan")
            self.carry(flow, link, sent, max(sent_at, received_at))


class SendRule(Rule):
    def __init__(self, wires: Wires) -> None:
        self._wires = wires

    def run(self, flow: Flow, rank: int, action: Action, start: float) -> None:
        self._wires.send(flow, link_of(rank, action), _tensor(flow, rank, action), start)


class ReceiveRule(Rule):
    def __init__(self, wires: Wires) -> None:
        self._wires = wires

    def run(self, flow: Flow, rank: int, action: Action, start: float) -> None:
        self._wires.receive(flow, link_of(rank, action), _tensor(flow, rank, action), start)


def _tensor(flow: Flow, rank: int, transfer: Action) -> Tensor:
    tensor = carried(flow.plan.shape, rank, transfer)
    if tensor is None:
        raise PlanError(f"rank {rank}, {transfer}: no such tensor; run schedule.check on the plan")
    return tensor
