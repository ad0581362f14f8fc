"""Units in flight: forwarded and not yet backwarded. Their peak sets a rank's activation memory."""

from __future__ import annotations

from collections.abc import Iterable

from slimpipe.schedule.action import Action, Op


def peak_units(actions: Iterable[Action], chunk: int | None = None) -> int:
    """Most units in flight at once in a rank's list, of one chunk or of all. A unit counts while its backward runs."""
    held = peak = 0
    for action in actions:
        if chunk is not None and action.unit.chunk != chunk:
            continue
        if action.op is Op.FORWARD:
            held += 1
            peak = max(peak, held)
        elif action.op is Op.BACKWARD:
            held -= 1
    return peak
