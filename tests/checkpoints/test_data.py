"""A run on a blend of a Megatron pair and JSON lines goes on where it stopped, and on its own data alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slimpipe.cli import app
from slimpipe.data import load_tokenizer
from slimpipe.data.build import build_tokens, learn_tokenizer
from slimpipe.data.corpus import open_corpus
from slimpipe.data.tokens import tokenizer_path
from slimpipe.train.checkpoint import read_note
from tests.checkpoints.conftest import rows
from tests.data.conftest import write_pair
from tests.support.jobs import Jobs


@pytest.fixture
def blended(tiny: list[str], tmp_path: Path) -> list[str]:
    """`tiny`, its corpus as a token file three times as heavy as some JSON lines; a part kept for evaluation."""
    config, corpus, *others = tiny
    text = Path(corpus.removeprefix("data.corpus="))
    lines = "".join(json.dumps({"text": f"def f{i}(x): return x + {i}\n"}) + "\n" for i in range(200))
    (tmp_path / "more.jsonl").write_text(lines)
    learn_tokenizer([open_corpus(str(text))], 300, tmp_path / "learnt", "text", "", progress=False)
    build_tokens(
        [open_corpus(str(text))], tmp_path / "learnt", tmp_path / "pair", "text", progress=False, keep_tokenizer=True
    )
    blend = f"[{{corpus: {tmp_path / 'pair'}, weight: 3.0}}, {{corpus: {tmp_path / 'more.jsonl'}, weight: 1.0}}]"
    evaluation = ["data.eval_share=0.1", "train.eval_every=2", "train.eval_batches=2"]
    return [config, f"data.blend={blend}", *evaluation, "parallel.pp=1", "optim.schedule=constant", *others]


def exact(run: Path) -> list[dict[str, float]]:
    """Losses of training and of evaluation, and norms: what must not change by a bit."""
    return [{key: row[key] for key in ("step", "loss", "grad_norm", "eval_loss") if key in row} for row in rows(run)]


def test_a_blend_is_resumed_where_it_stopped(jobs: Jobs, blended: list[str], tmp_path: Path) -> None:
    """By every bit, evaluations included."""
    alone, parted = tmp_path / "alone", tmp_path / "parted"
    for output, steps in ((alone, 8), (parted, 4), (parted, 8)):
        job = jobs.run(*blended, f"train.steps={steps}", f"train.output={output}")
        assert job.wait() == [0], job.said
    assert "resumed from" in job.said
    steps = [row for row in rows(alone) if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 9)) and exact(parted) == exact(alone)
    place = read_note(parted / "checkpoints" / "step_8")["data"]
    assert (place["consumed"], place["counts"]) == (16, [12, 4])  # 3 to 1
    # The run's tokenizer is the one beside the pair.
    assert load_tokenizer(alone).digest == load_tokenizer(tokenizer_path(tmp_path / "pair")).digest


def test_other_data_than_the_checkpoint_was_trained_on(jobs: Jobs, blended: list[str], tmp_path: Path) -> None:
    settings = [*blended, f"train.output={tmp_path / 'run'}"]
    assert jobs.run(*settings, "train.steps=3").wait() == [0]
    with (tmp_path / "more.jsonl").open("a") as file:
        file.write('{"text": "def g(y): return y\\n"}\n')
    job = jobs.run(*settings, "train.steps=5")
    job.wait()
    more = tmp_path / "more.jsonl"
    line = (
        f"data.blend[1].corpus = {more}: its tokens are not those that the checkpoint was trained on; set it back, or"
    )
    assert line in job.said and "step 4" not in job.said, job.said


def test_tokens_of_nobody_knows_what_tokenizer(jobs: Jobs, tiny: list[str], tmp_path: Path) -> None:
    """A pair as Megatron leaves it trains; to generate from such a run there is no tokenizer, and that is said."""
    prefix = write_pair(tmp_path / "theirs", [range(300)] * 9)
    job = jobs.run(
        tiny[0],
        f"data.corpus={prefix}",
        *tiny[2:],
        "parallel.pp=1",
        "train.steps=2",
        f"train.output={tmp_path / 'run'}",
    )
    assert job.wait() == [0] and len(rows(tmp_path / "run")) == 2, job.said
    result = CliRunner().invoke(app, ["generate", str(tmp_path / "run"), "--prompt", "x"])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"{tmp_path / 'run'}: has no tokenizer.json: it was trained on token files alone;")
