"""What a rank holds between two of its actions on the same unit, and how many of that at most."""

from __future__ import annotations

from collections.abc import Iterable

from slimpipe.schedule.action import Action, Op, Unit
from slimpipe.schedule.plan import Shape


def peak_units(actions: Iterable[Action], chunk: int | None = None) -> int:
    """Most units in flight at once in a rank's list, forwarded and not yet backwarded, of one chunk or of all.

    Their peak sets a rank's activation memory. A unit counts while its backward runs.
    """
    return peak_held(
        (action for action in actions if chunk is None or action.unit.chunk == chunk), Op.FORWARD, Op.BACKWARD
    )


def peak_kept(shape: Shape, actions: Iterable[Action], chunk: int | None = None) -> int:
    """Most units at once whose keys and values a rank's list keeps, of one chunk or of all.

    In training until the unit's backward: the units in flight. In a list without backwards (`schedule.forward_only`)
    until its microbatch's last slice has gone forward.
    """
    actions = [a for a in actions if a.op.is_compute and (chunk is None or a.unit.chunk == chunk)]
    if not is_forward_only(actions):
        return peak_units(actions)
    now = peak = 0
    for action in actions:
        now += 1
        peak = max(peak, now)
        if action.unit.slice == shape.n - 1:
            now -= shape.n
    return peak


def is_forward_only(actions: Iterable[Action]) -> bool:
    """Whether a rank's list is an evaluation's."""
    return not any(action.op is Op.BACKWARD for action in actions)


def peak_held(actions: Iterable[Action], made_by: Op, used_by: Op) -> int:
    """Most units at once between `made_by` and `used_by` in a rank's list, `used_by` included.

    S to T: logits shards. H to T: the last stage's output as broadcast; T to B, on the last rank: its gradient. E to F,
    on rank 0: embeddings; G to D: their gradient. Units that are never `made_by` here do not count.
    """
    held: set[Unit] = set()
    peak = 0
    for action in actions:
        if action.op is made_by:
            held.add(action.unit)
            peak = max(peak, len(held))
        elif action.op is used_by:
            held.discard(action.unit)
    return peak
