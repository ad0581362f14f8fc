"""On a GPU: a skipped step changes no bit, and the host waits for nothing between the engine's step and its end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from slimpipe.runtime.carrier import Carrier
from slimpipe.train.session import Session
from tests.numerics.harness import batch_of, case, config_of, copies

pytestmark = pytest.mark.gpu
SHAPE = case(v=2, n=4, m=2)


def session_of(**train: Any) -> Session:
    settings = {"device": "cuda", "dtype": "bfloat16", "attention": "plain", "on_nonfinite": "skip"}
    return Session(config_of(SHAPE, train=settings | train), Carrier(torch.device("cuda", 0)))


def state(session: Session) -> dict[str, Tensor]:
    masters = {f"master.{name}": master.data for name, master in session.optimizer.masters.items()}
    return copies(session.weights() | masters | session.optimizer.state())


@pytest.fixture(autouse=True)
def _waiting_is_allowed_again() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_skipped_step_changes_no_bit_and_waits_for_nothing(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of()
    session.train_step(*batch_of(SHAPE))
    before = state(session)
    step, stop = session.engine.step, session.clock.stop

    def poisoned(batch: Any) -> Tensor:
        loss = step(batch)
        session.gradients()["layers.1.mlp.down.weight"].view(-1)[3:4].fill_(value)
        torch.cuda.set_sync_debug_mode("error")
        return loss

    def stopped() -> Any:
        torch.cuda.set_sync_debug_mode("default")
        return stop()

    monkeypatch.setattr(session.engine, "step", poisoned)
    monkeypatch.setattr(session.clock, "stop", stopped)
    bad = session.train_step(*batch_of(SHAPE)).bad
    assert bad is not None and bad.first_bad == (0, "layers.1.mlp.down.weight") and bad.where is None
    after = state(session)
    assert all(torch.equal(before[name], after[name]) for name in before)

    monkeypatch.undo()
    assert session.train_step(*batch_of(SHAPE)).bad is None
    changed = state(session)
    assert any(not torch.equal(before[name], changed[name]) for name in before)
