"""A step whose loss or gradient is not finite: all ranks leave it out to the bit, or stop; what they say of it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from slimpipe.train.nonfinite import NonFinite, Skips
from slimpipe.train.session import Session
from tests.numerics.harness import batch_of, case, config_of, copies
from tests.support.cover import Case
from tests.support.pool import Pool

STEPS = 4
BAD = 1  # the second step of four
OPTIM = {"lr": 1e-2, "warmup_steps": 0, "schedule": "constant"}


def session_of(case: Case, on_nonfinite: str = "skip", **sections: Any) -> Session:
    train = {"on_nonfinite": on_nonfinite} | sections.pop("train", {})
    return Session(config_of(case, optim=OPTIM, train=train, **sections))


def batches(case: Case) -> list[tuple[Tensor, Tensor]]:
    """One for each step."""
    tokens, labels = batch_of(case)
    return [((tokens + step) % 61, (labels + step) % 61) for step in range(STEPS)]


def poison(session: Session, parameter: str, value: float) -> Callable[[], None]:
    """Puts `value` into a gradient of the steps that follow, on the rank that has the parameter; returns the cure."""
    step = session.engine.step

    def poisoned(batch: Any) -> Tensor:
        loss = step(batch)
        if parameter in session.gradients():
            session.gradients()[parameter].view(-1)[3] = value
        return loss

    session.engine.step = poisoned  # type: ignore[method-assign]
    return lambda: setattr(session.engine, "step", step)


def state(session: Session) -> dict[str, Tensor]:
    """All that a step may change, in copies: weights, masters, moments, and how many steps the moments have seen."""
    optimizer = session.optimizer
    counts = {name: optimizer._adamw.state[master]["step"] for name, master in optimizer.masters.items()}
    masters = {f"master.{name}": master.data for name, master in optimizer.masters.items()}
    return copies(session.weights() | masters | optimizer.state() | {f"count.{k}": v for k, v in counts.items()})


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- one process ----


@pytest.mark.parametrize(("dtype", "value"), [("float32", float("nan")), ("bfloat16", float("inf"))])
def test_a_skipped_step_changes_no_bit(value: float, dtype: str) -> None:
    """And the steps behind it go as if it had not been."""
    shape = case(v=2, n=4, m=2)
    with_bad, without = (session_of(shape, train={"dtype": dtype}) for _ in range(2))
    for step, batch in enumerate(batches(shape)):
        if step != BAD:
            assert with_bad.train_step(*batch).loss == without.train_step(*batch).loss
            continue
        before = state(with_bad)
        cure = poison(with_bad, "layers.2.mlp.down.weight", value)
        metrics = with_bad.train_step(*batch)
        cure()
        assert same(before, state(with_bad))
        assert metrics.bad is not None and metrics.bad.first_bad == (0, "layers.2.mlp.down.weight")
        assert metrics.bad.ranks[0].values == metrics.bad.ranks[0].parameters == 1
    assert same(state(with_bad), state(without))
    assert (with_bad.steps_done, without.steps_done) == (STEPS, STEPS - 1)


def test_stopping_raises_and_leaves_the_state_before_the_step() -> None:
    shape = case(n=4, m=2)
    session = session_of(shape, "stop")
    good, bad, *_ = batches(shape)
    session.train_step(*good)
    before = state(session)
    poison(session, "layers.1.attention.qkv.weight", float("nan"))
    with pytest.raises(NonFinite) as caught:
        session.train_step(*bad, ["here", "there"])
    assert same(before, state(session)) and session.steps_done == 1
    assert re.fullmatch(
        r"step 2: loss \d\.\d+, gradient norm nan; first bad parameter as the backward goes: "
        r"layers\.1\.attention\.qkv\.weight on rank 0 \(1 bad gradient values in 1 parameters, rank 0\); run again, "
        r"its batch has finite losses \(here; there\)\. Weights and optimizer are those before the step\. "
        r"Look at the batch, lower optim\.lr, or set train\.on_nonfinite: skip",
        str(caught.value),
    )


def test_the_bad_token_is_named() -> None:
    """Weights that make one word's loss infinite: the batch itself shows where."""
    shape = case(n=4, m=2, micro_batch=2)
    session = session_of(shape)
    tokens, labels = batch_of(shape)
    tokens[tokens == 7] = 8
    tokens[2, 40] = 7
    session.weights()["embedding.weight"][7] = float("inf")
    metrics = session.train_step(tokens, labels, ["a", "b", "c.txt, tokens 7 to 71, epoch 0", "d"])
    bad = metrics.bad
    said = "; the first bad loss is in tokens 32 to 47 of sequence 2 (c.txt, tokens 7 to 71, epoch 0)"
    assert bad is not None and str(bad).endswith(said)
    # Everything behind the loss is bad then: the output layer is where the backward starts.
    assert bad.first_bad is not None and bad.first_bad[1].startswith("head.") and bad.ranks[0].parameters > 10


def test_squares_that_overflow() -> None:
    """Gradients that are finite, of a norm that is not: nothing can be named, nothing may be changed."""
    shape = case(n=2, m=1)
    session = session_of(shape)
    before = state(session)
    poison(session, "layers.0.mlp.down.weight", 1e30)
    metrics = session.train_step(*batch_of(shape))
    assert metrics.bad is not None and metrics.bad.first_bad is None
    assert "every gradient is finite by itself, and their squares overflow" in str(metrics.bad)
    assert same(before, state(session))


def test_nothing_is_read_from_the_device_before_the_step_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read in mid-step would wait for a GPU. Labels are counted on the host, before; they are integers."""
    shape = case(n=2, m=2)
    session = session_of(shape)
    reads: list[str] = []
    for name in ("item", "__float__", "__bool__", "__int__", "tolist", "cpu", "numpy"):
        plain = getattr(Tensor, name)

        def counted(self: Tensor, *rest: Any, name: str = name, plain: Any = plain) -> Any:
            if self.is_floating_point() or self.dtype == torch.bool:
                reads.append(name)
            return plain(self, *rest)

        monkeypatch.setattr(Tensor, name, counted)
    stop = session.clock.stop

    def stopped() -> Any:
        reads.append("stop")
        return stop()

    monkeypatch.setattr(session.clock, "stop", stopped)
    poison(session, "layers.0.mlp.down.weight", float("nan"))
    session.train_step(*batch_of(shape))
    assert reads[0] == "stop" and len(reads) > 1


def test_too_many_in_a_row_stop_the_run() -> None:
    shape = case(n=2, m=1)
    session = session_of(shape)
    poison(session, "layers.0.mlp.down.weight", float("nan"))
    bad = session.train_step(*batch_of(shape)).bad
    skips = Skips(3)
    for seen in (bad, bad, None, bad, bad):
        skips.after(seen)
    with pytest.raises(NonFinite, match=r"train\.max_skips = 3: so many steps in a row were skipped; step 1: loss"):
        skips.after(bad)


# ---- two ranks ----


def skip_on_two(rank: int, world: int, case: Case, parameter: str) -> tuple[str, bool, list[float], bool]:
    """What a rank says of the step, whether its state stayed, its losses, and whether it has the parameter."""
    session = session_of(case)
    losses, said, kept = [], "", False
    for step, batch in enumerate(batches(case)):
        before = state(session)
        cure = poison(session, parameter, float("nan")) if step == BAD else lambda: None
        metrics = session.train_step(*batch)
        cure()
        if step == BAD:
            said, kept = str(metrics.bad), same(before, state(session))
        losses.append(metrics.loss)
    return said, kept, losses, parameter in session.parameters


def stop_on_two(rank: int, world: int, case: Case) -> tuple[str, bool]:
    session = session_of(case, "stop")
    before = state(session)
    poison(session, "layers.3.mlp.down.weight", float("inf"))
    try:
        session.train_step(*batch_of(case))
    except NonFinite as error:
        return str(error), same(before, state(session))
    return "", False


@pytest.mark.parametrize(
    ("tied", "vocabulary", "parameter", "rank"),
    [
        (False, True, "layers.0.attention.output.weight", 0),
        (False, True, "layers.3.mlp.gate_up.weight", 1),
        (True, False, "layers.3.mlp.gate_up.weight", 1),
    ],
)
def test_two_ranks_decide_alike(
    tied: bool, vocabulary: bool, parameter: str, rank: int, pool: Callable[[int], Pool]
) -> None:
    """One value on one rank: both leave their weights as they were and name it; the run goes on."""
    shape = case(pp=2, n=4, m=2, tied=tied, vocab_parallel=vocabulary)
    said, kept, losses, has = zip(*pool(2).run(skip_on_two, shape, parameter), strict=True)
    assert has == tuple(holder == rank for holder in range(2))
    assert said[0] == said[1] and kept == (True, True)
    assert f"{parameter} on rank {rank} (1 bad gradient values in 1 parameters, rank {rank})" in said[0]
    assert losses[0] == losses[1] and all(map(math.isfinite, losses[0]))


def test_two_ranks_stop_alike(pool: Callable[[int], Pool]) -> None:
    (first, kept_first), (second, kept_second) = pool(2).run(stop_on_two, case(pp=2, n=4, m=2))
    assert first == second and "layers.3.mlp.down.weight on rank 1" in first
    assert kept_first and kept_second
