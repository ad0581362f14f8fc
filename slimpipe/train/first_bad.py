"""Looks for where a step went wrong whose loss or gradient is not finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slimpipe.parallel.gradients import BadGradients, bad_gradients
from slimpipe.train.nonfinite import BadStep

if TYPE_CHECKING:
    from slimpipe.train.session import Session


def find_bad_step(
    session: Session, loss: float, norm: float, tokens: Tensor, labels: Tensor, places: Sequence[object]
) -> BadStep:
    """Of the step that `session` has just run on `tokens`, `labels`: the gradients of every rank, and the batch again,
    forward only. `places[i]`: where sequence i was taken from. Collective."""
    session.progress.now("search for the first bad parameter")
    names = session.names
    order = {name: place for place, name in enumerate(names)}
    mine = bad_gradients(session.gradients(), order)
    row = torch.tensor([mine.last, mine.values, mine.parameters], dtype=torch.float64, device=session.carrier.memory)
    found = [BadGradients(*row) for row in session.gather(row).long().tolist()]
    again = session.token_losses(tokens, labels)
    where = None
    for sequence, token in (~again.isfinite()).nonzero()[:1].tolist():
        start = token // session.slice_tokens * session.slice_tokens
        where = (sequence, start, start + session.slice_tokens - 1)
    told = tuple(str(place) for place in places) or tuple(f"sequence {i}" for i in range(len(tokens)))
    return BadStep(session.steps_done + 1, loss, norm, names, tuple(found), where, told)
