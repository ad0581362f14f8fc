"""A lowered plan replayed under NCCL's rules, as data (docs/architecture.md, "NCCL order").

The rules. Operations of one communicator run on each rank in the order in which that rank posted them. A send and a
receive complete together, when each is at the head of its rank's queue and they face each other; NCCL matches them by
that alone, so if they name different tensors, data has gone to the wrong place. The host posts without blocking; a
forward or backward blocks until its receive has completed; and before a send the host waits until its link has fewer
than `send_window` earlier sends under way, which bounds the buffers that they hold.

A collective completes when every rank has posted it, each behind the same earlier ones of its communicator; what waits
for it blocks (`schedule.collectives`). A rank that only contributes to a reduce waits with the next of that kind until
fewer than `reduce_window` are under way.

The exchange has a communicator of its own (`schedule.exchange_replay`); a forward, backward or helper that takes part
in loans blocks until its batches have run.

Time plays no part: each queue's order is fixed by the plan, so whether the plan ends does not depend on speed. This
is how one communicator for all forwards is seen to deadlock with v >= 2, which gloo never shows.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

from slimpipe.schedule.action import Action, Op
from slimpipe.schedule.collectives import Collective, Communicator, awaited_by, contributes, posted_by, poster
from slimpipe.schedule.excerpt import refusal
from slimpipe.schedule.exchange_replay import ExchangeReplay
from slimpipe.schedule.loans import Exchange
from slimpipe.schedule.plan import Plan, PlanError
from slimpipe.schedule.rendezvous import Mismatch, Rendezvous
from slimpipe.schedule.transfers import Kind, Link, Tensor, carried, link_of, receive_before

LinkCommunicator = Callable[[Kind, int, int], Hashable]
"""(kind, src, dst) -> which communicator carries that link; equal values share one."""


def one_per_link(kind: Kind, src: int, dst: int) -> Hashable:
    return Link(kind, src, dst)


@dataclass(frozen=True)
class Report:
    """What a replay saw: transfers by link, collectives by communicator, each rank's most receives and sends at once.

    `exchanged`: transfers of loans. The counts of sends and receives are those of the one interleaving of ranks that
    was replayed; others may differ.
    """

    transfers: dict[Link, int]
    collectives: dict[Communicator, int]
    most_receives: tuple[int, ...]
    most_sends: tuple[int, ...]
    exchanged: int = 0


def replay_in_order(
    plan: Plan,
    *,
    send_window: int = 2,
    reduce_window: int = 2,
    communicator: LinkCommunicator = one_per_link,
    exchange: Exchange | None = None,
    layers: int = 2,
) -> Report:
    """Replay a lowered plan. `exchange`: its loans, if it has any; `layers`: of a chunk, each with its own transfers.

    Raises PlanError where wrong data would match, or on deadlock, with every rank's place.
    """
    for name, window in (("send_window", send_window), ("reduce_window", reduce_window)):
        if window < 1:
            raise PlanError(f"{name} = {window}: must be at least 1")
    if not plan.is_lowered and plan.shape.p > 1:
        raise PlanError(f"{plan.name}: has no sends and receives; lower it first")
    loans = ExchangeReplay(exchange, layers) if exchange is not None else None
    replay = _Replay(plan, send_window, reduce_window, communicator, loans)
    replay.run()
    return Report(
        dict(replay.transfers),
        dict(replay.collectives),
        tuple(replay.most_receives),
        tuple(replay.most_sends),
        loans.moved if loans is not None else 0,
    )


def least_send_window(
    plan: Plan,
    communicator: LinkCommunicator = one_per_link,
    exchange: Exchange | None = None,
    at_least: int = 1,
) -> int:
    """The smallest `send_window`, from `at_least` up, under which a lowered plan runs to its end: `replay_in_order` has
    passed it.

    1 in the schedules built so far, with one exception. Where p does not divide n, slimpipe's groups are longer than
    the pipeline (G > p). With v > 1 such a group comes round to rank 0 while that is still busy with the group's last
    G - p slices: that many tensors lie in rank p-1's send buffers, and under a smaller window both ranks wait for each
    other.
    Raises PlanError where the plan does not run under any window.
    """

    def runs(window: int) -> bool:
        try:
            replay_in_order(plan, send_window=window, communicator=communicator, exchange=exchange)
        except PlanError:
            return False
        return True

    # A replay of a long plan takes a while, and nearly always this one is all.
    if runs(at_least):
        return at_least
    low, high = at_least, max(at_least, *map(len, plan.ranks))
    replay_in_order(plan, send_window=high, communicator=communicator, exchange=exchange)
    while high - low > 1:
        # Small windows are the common answer: look among them before halving.
        middle = min((low + high) // 2, 2 * low + 1)
        if runs(middle):
            high = middle
        else:
            low = middle
    return high


class _Posted(NamedTuple):
    rank: int
    at: int
    action: Action
    link: Link
    tensor: Tensor | None


class _Blocked(NamedTuple):
    """What a rank waits for: a receive or collective that has to complete, or a link that has to have room. `why` in
    words, once they are asked for."""

    by: tuple[int, Action] | Collective | Link
    why: Callable[[], str]


class _Replay:
    def __init__(
        self,
        plan: Plan,
        send_window: int,
        reduce_window: int,
        communicator: LinkCommunicator,
        loans: ExchangeReplay | None,
    ) -> None:
        p = plan.shape.p
        self._loans = loans
        self._plan = plan
        self._window = send_window
        self._reduce_window = reduce_window
        self._communicator = communicator
        self._in_passes = plan.has_vocabulary
        self._next = [0] * p
        self._queues: defaultdict[tuple[Hashable, int], deque[_Posted]] = defaultdict(deque)
        self._completed: set[tuple[int, Action]] = set()
        self._sends_under_way: Counter[Link] = Counter()
        self._under_way = {"sends": [0] * p, "receives": [0] * p}
        self._waiting: defaultdict[Hashable, set[int]] = defaultdict(set)
        self._rendezvous = Rendezvous(p)
        self._met: set[Collective] = set()
        self._contributed: defaultdict[tuple[int, Op], list[Collective]] = defaultdict(list)
        self.transfers: Counter[Link] = Counter()
        self.collectives: Counter[Communicator] = Counter()
        self.most_receives = [0] * p
        self.most_sends = [0] * p

    def run(self) -> None:
        ready = list(range(self._plan.shape.p))
        while ready:
            ready.extend(self._walk(ready.pop()))
        self._prove_finished()

    def _walk(self, rank: int) -> set[int]:
        """Carry a rank's list on until it blocks. Returns the ranks that waited for something that completed."""
        freed: set[int] = set()
        actions = self._plan.ranks[rank]
        for index in range(self._next[rank], len(actions)):
            self._next[rank] = index
            action = actions[index]
            blocked = self._blocked(rank, action)
            if blocked is not None:
                self._waiting[blocked.by].add(rank)
                return freed
            if self._loans is not None:
                freed |= self._loans.enter(rank, action)
                if self._loans.waits(rank):
                    return freed
            if action.op.is_transfer:
                self._post(rank, index, freed)
            elif action.op.is_vocabulary:
                self._meet(rank, index, freed)
        self._next[rank] = len(actions)
        return freed

    def _blocked(self, rank: int, action: Action) -> _Blocked | None:
        """Why the rank's next action cannot run yet; None where it can."""
        collective = awaited_by(self._plan.shape, rank, action) if self._in_passes else None
        if collective is not None and collective not in self._met:
            return _Blocked(
                collective, lambda: f"ranks {self._rendezvous.missing(collective)} have not posted the {collective}"
            )
        if action.op.is_compute:
            receive = receive_before(self._plan.shape, rank, action)
            if receive is not None and (rank, receive) not in self._completed:
                return _Blocked((rank, receive), lambda: f"{receive} has not completed")
        elif action.op.is_send:
            link = link_of(rank, action)
            if self._sends_under_way[link] >= self._window:
                return _Blocked(
                    link, lambda: f"{self._sends_under_way[link]} earlier sends on link {link} have not completed"
                )
        elif contributes(self._plan.shape, rank, action):
            earlier = self._contributed[rank, action.op][-self._reduce_window :]
            if len(earlier) == self._reduce_window and earlier[0] not in self._met:
                return _Blocked(earlier[0], lambda: f"the {earlier[0]} has not completed")
        return None

    def _meet(self, rank: int, index: int, freed: set[int]) -> None:
        """Post a vocabulary pass's collective; where that completes it, those that wait for it are free."""
        action = self._plan.ranks[rank][index]
        collective = posted_by(action)
        if collective is None:
            return
        if contributes(self._plan.shape, rank, action):
            self._contributed[rank, action.op].append(collective)
        try:
            if not self._rendezvous.post(rank, collective):
                return
        except Mismatch as mismatch:
            raise refusal(self._plan, rank, index, str(mismatch)) from None
        self._met.add(collective)
        self.collectives[collective.communicator] += 1
        freed |= self._waiting.pop(collective, set())

    def _post(self, rank: int, index: int, freed: set[int]) -> None:
        action = self._plan.ranks[rank][index]
        link = link_of(rank, action)
        communicator = self._communicator(*link)
        self._queues[communicator, rank].append(
            _Posted(rank, index, action, link, carried(self._plan.shape, rank, action))
        )
        if action.op.is_send:
            self._sends_under_way[link] += 1
        self._count(rank, action, 1)
        self._complete_heads(communicator, rank, freed)

    def _complete_heads(self, communicator: Hashable, rank: int, freed: set[int]) -> None:
        """Complete pairs at the heads of a communicator's queues, as far as those at `rank` set others free."""
        look_at = [rank]
        while look_at:
            at = look_at.pop()
            ours = self._queues[communicator, at]
            if not ours or (peer := ours[0].action.peer) is None:
                continue
            theirs = self._queues[communicator, peer]
            if not theirs or theirs[0].link != ours[0].link or theirs[0].rank == ours[0].rank:
                continue
            self._complete(ours.popleft(), theirs.popleft(), freed)
            look_at += (at, peer)

    def _complete(self, a: _Posted, b: _Posted, freed: set[int]) -> None:
        send, receive = (a, b) if a.action.op.is_send else (b, a)
        if send.tensor != receive.tensor:
            raise refusal(
                self._plan,
                receive.rank,
                receive.at,
                f"wrong data matched on link {send.link}: the {send.tensor} (rank {send.rank}, action {send.at}, "
                f"{send.action}) arrives where the {receive.tensor} is expected",
            )
        received = receive.rank, receive.action
        self._completed.add(received)
        self._sends_under_way[send.link] -= 1
        self.transfers[send.link] += 1
        self._count(send.rank, send.action, -1)
        self._count(receive.rank, receive.action, -1)
        freed |= self._waiting.pop(received, set()) | self._waiting.pop(send.link, set())

    def _count(self, rank: int, action: Action, by: int) -> None:
        what, most = ("sends", self.most_sends) if action.op.is_send else ("receives", self.most_receives)
        self._under_way[what][rank] += by
        most[rank] = max(most[rank], self._under_way[what][rank])

    def _reason(self, rank: int) -> str | None:
        """Why a rank that has not come to its end is where it is."""
        blocked = self._blocked(rank, self._plan.ranks[rank][self._next[rank]])
        if blocked is not None:
            return blocked.why()
        return None if self._loans is None else self._loans.waits_for(rank)

    def _prove_finished(self) -> None:
        plan = self._plan
        blocked = [rank for rank in range(plan.shape.p) if self._next[rank] < len(plan.ranks[rank])]
        if blocked:
            places = "; ".join(
                f"rank {rank} at action {self._next[rank]} ({plan.ranks[rank][self._next[rank]]}): {self._reason(rank)}"
                for rank in blocked
            )
            hint = ""
            if any(plan.ranks[rank][self._next[rank]].op.is_send for rank in blocked):
                hint = f"; send_window = {self._window} may be too small: least_send_window finds one that is not"
            raise refusal(plan, blocked[0], self._next[blocked[0]], f"deadlock in order of posting: {places}{hint}")
        for queue in self._queues.values():
            if queue:
                raise refusal(plan, queue[0].rank, queue[0].at, f"peer {queue[0].action.peer} never met it")
        for collective in self._rendezvous.incomplete():
            missing = self._rendezvous.missing(collective)
            rank = next(rank for rank in range(plan.shape.p) if rank not in missing)
            at = plan.ranks[rank].index(poster(plan.shape, collective))
            raise refusal(plan, rank, at, f"ranks {missing} never posted the {collective}")
