"""`train.eval_every` as a user sees it: the evaluation's lines, its curve, and training losses that do not notice."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from slimpipe.config import ConfigError, load_config
from slimpipe.data import open_data
from slimpipe.train.held_out import HeldOut
from tests.end_to_end.launch import QUICKSTART
from tests.support.jobs import Jobs

STEPS, EVERY, BATCHES = 7, 5, 3
# Every step changes the weights so much that evaluations differ.
RUN = ["model.layers=4", "model.hidden_size=32", f"train.steps={STEPS}", "optim.lr=1e-2", "optim.warmup_steps=0"]
EVALUATED = [f"train.eval_every={EVERY}", f"train.eval_batches={BATCHES}"]


def rows(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_evaluations_are_recorded_and_change_no_training_loss(jobs: Jobs, small: list[str], tmp_path: Path) -> None:
    """The tokens kept for evaluation are kept in both runs: what is trained on is the same."""
    kept = [*RUN, *small, "data.eval_share=0.1"]
    without, with_ = tmp_path / "without", tmp_path / "with"
    more = [*EVALUATED, "log.tensorboard=true"]
    for output, others in ((without, []), (with_, more)):
        job = jobs.run(QUICKSTART, *kept, *others, f"train.output={output}", ranks=2)
        assert job.wait() == [0, 0], job.said

    steps, plain = [row for row in rows(with_) if "loss" in row], rows(without)
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in steps] == [row[key] for row in plain]
    found = [row for row in rows(with_) if "eval_loss" in row]
    assert [row["step"] for row in found] == [EVERY, STEPS]
    assert [row["eval_tokens"] for row in found] == [BATCHES * 2 * 64] * 2
    assert all(0 < row["eval_loss"] < 2 * math.log(400) for row in found)
    assert found[1]["eval_loss"] < found[0]["eval_loss"]
    for row in found:
        assert f"step {row['step']}: evaluation loss {row['eval_loss']:.4f} over 384 tokens" in job.said
    assert curve(with_, "eval_loss") == {row["step"]: pytest.approx(row["eval_loss"]) for row in found}


def curve(output: Path, tag: str) -> dict[int, float]:
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = loading.EventAccumulator(str(output / "tensorboard"))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


def test_the_same_batches_each_time_and_none_that_is_trained_on(small: list[str], tmp_path: Path) -> None:
    config = load_config(QUICKSTART, [*small, *EVALUATED, "data.eval_share=0.1", "train.output=unused"])
    data = open_data(config.data, config.model.vocab_size, config.train.seed, progress=False)
    held_out = HeldOut(config, data.evaluation)
    first, second = list(held_out.batches()), list(held_out.batches())
    assert len(first) == BATCHES
    assert all((a[0] == b[0]).all() and (a[1] == b[1]).all() for a, b in zip(first, second, strict=True))
    trained = {tuple(row.tolist()) for row in data.train.sequences(0, sum(data.train.windows))[:, :-1]}
    assert trained.isdisjoint(tuple(row.tolist()) for tokens, _ in first for row in tokens)
    assert [step for step in range(1, config.train.steps + 1) if held_out.due(step)] == list(range(5, 151, 5))


def test_what_cannot_be_evaluated_is_told_in_one_line(small: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(QUICKSTART, [*small, "train.eval_every=5"])
    assert caught.value.lines == (
        "train.eval_every = 5: no data is kept for evaluation; set data.eval_share (0.01, say), data.eval_corpus or "
        "data.eval_blend",
    )
    with pytest.raises(ConfigError, match="train.eval_every = -1: must be a whole number >= 0 or null"):
        load_config(QUICKSTART, [*small, "train.eval_every=-1"])
    assert load_config(QUICKSTART, [*small, "train.eval_every=0"]).train.eval_every is None


@pytest.mark.parametrize("ask, advice", [(500, "lower it to {have}, or raise data.eval_share"), (1, None)])
def test_too_little_kept_is_told_before_anything_starts(ask: int, advice: str | None, small: list[str]) -> None:
    overrides = [*small, "train.eval_every=5", f"train.eval_batches={ask}", "data.eval_share=0.1"]
    config = load_config(QUICKSTART, overrides)
    data = open_data(config.data, config.model.vocab_size, config.train.seed, progress=False)
    assert data.evaluation is not None
    if advice is None:
        HeldOut(config, data.evaluation)
        return
    sequences = sum(data.evaluation.windows)
    have = sequences // 2
    with pytest.raises(ValueError) as caught:
        HeldOut(config, data.evaluation)
    assert str(caught.value) == (
        f"train.eval_batches = {ask}: {sequences} sequences are kept for evaluation, enough for {have} batches "
        f"of 2 (train.global_batch); {advice.format(have=have)} or evaluate on other data"
    )
