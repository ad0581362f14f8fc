"""Collectives as meetings of all ranks in the order of posting: what the simulator and the replay have in common."""

from __future__ import annotations

from slimpipe.schedule.collectives import COMMUNICATORS, Collective, Communicator
from slimpipe.schedule.plan import PlanError


class Mismatch(PlanError):
    """A rank posted one collective where another rank's order of the same communicator has a different one."""

    def __init__(self, posted: Collective, met: Collective) -> None:
        super().__init__(
            f"communicator {posted.communicator}: the {posted} meets the {met}; run schedule.check on the plan"
        )
        self.met = met


class Rendezvous:
    """Who has posted what. A collective is complete once its last rank has posted it; then so are all before it."""

    def __init__(self, ranks: int) -> None:
        self._order: dict[Communicator, list[Collective]] = {name: [] for name in COMMUNICATORS}
        self._at: dict[Collective, int] = {}
        self._posted: dict[Communicator, list[int]] = {name: [0] * ranks for name in COMMUNICATORS}
        self._left: dict[Collective, int] = {}

    def post(self, rank: int, collective: Collective) -> bool:
        """Whether this completes it. Raises Mismatch where the ranks' orders differ."""
        order, posted = self._order[collective.communicator], self._posted[collective.communicator]
        at = posted[rank]
        posted[rank] += 1
        if at == len(order):
            order.append(collective)
            # Of one that is posted again, where it stands first.
            self._at.setdefault(collective, at)
            self._left[collective] = len(posted)
        elif order[at] != collective:
            raise Mismatch(collective, order[at])
        self._left[collective] -= 1
        return self._left[collective] == 0

    def missing(self, collective: Collective) -> list[int]:
        """Ranks that have not posted it."""
        posted = self._posted[collective.communicator]
        at = self._at.get(collective, len(self._order[collective.communicator]))
        return [rank for rank, count in enumerate(posted) if count <= at]

    def incomplete(self) -> list[Collective]:
        """Collectives that some ranks have posted and others not."""
        return [collective for collective, left in self._left.items() if left]
