"""`slimpipe train` on two ranks and alone, and `slimpipe generate` from what they leave, as real commands."""

from __future__ import annotations

import json
import math
import re
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from typer.testing import CliRunner

from slimpipe.cli import app
from slimpipe.config import Config, load_config
from slimpipe.data import load_tokenizer, open_data
from slimpipe.schedule import Action
from slimpipe.train import checkpoint
from slimpipe.train import generate as generation
from slimpipe.train.planning import make_plan
from tests.end_to_end.launch import QUICKSTART, Finished, slimpipe
from tests.support.jobs import Jobs
from tests.support.reference import IGNORED, LlamaSpec, reference_loss_and_grads

STEPS = 8
DOCUMENTED = {"step", "loss", "grad_norm", "lr", "tokens_per_s", "peak_memory_bytes", "bubble"}
PROMPT = "def add_argument(self, "


@dataclass(frozen=True)
class Run:
    """A finished training and its folder."""

    output: Path
    arguments: list[str]
    finished: Finished

    @property
    def config(self) -> Config:
        return load_config(self.output / "config.yaml")

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.output / "metrics.jsonl").read_text().splitlines()]

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows]


def train(output: Path, small: list[str], *overrides: str, ranks: int = 1) -> Run:
    # A constant rate, so that the number of steps changes nothing but the number of steps.
    rate = ["optim.schedule=constant", "optim.warmup_steps=0"]
    arguments = ["train", QUICKSTART, *small, "model.layers=4", *rate, *overrides, f"train.output={output}"]
    return Run(output, arguments, slimpipe(*arguments, ranks=ranks))


@pytest.fixture(scope="module")
def pipelined(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two ranks, four slices, every action traced."""
    output = tmp_path_factory.mktemp("pipelined") / "run"
    return train(output, small, f"train.steps={STEPS}", "pipeline.trace=true", ranks=2)


@pytest.fixture(scope="module")
def plain(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One process, whole sequences, one step more."""
    output = tmp_path_factory.mktemp("plain") / "run"
    return train(output, small, "parallel.pp=1", "pipeline.slices=1", f"train.steps={STEPS + 1}")


# ---- train ----


def test_two_ranks_train(pipelined: Run) -> None:
    assert pipelined.finished.code == 0, pipelined.finished.err
    assert "Warning" not in pipelined.finished.err
    assert [row["step"] for row in pipelined.rows] == list(range(1, STEPS + 1))
    for row in pipelined.rows:
        assert row.keys() >= DOCUMENTED
        assert 0 <= row["bubble"] < 1
        assert row["grad_norm"] > 0 and row["tokens_per_s"] > 0 and row["peak_memory_bytes"] > 0
        assert row["lr"] == 3e-3
    assert pipelined.losses[0] == pytest.approx(math.log(400), abs=0.2)
    assert pipelined.losses[-1] < pipelined.losses[0] - 0.3


def test_the_run_is_left_in_its_folder(pipelined: Run) -> None:
    assert {path.name for path in pipelined.output.iterdir()} == {
        "checkpoints",
        "config.yaml",
        "metrics.jsonl",
        "tokenizer.json",
        "tokenizer_config.json",
        ".lock",
    }
    assert [path.name for path in (pipelined.output / "checkpoints").iterdir()] == [f"step_{STEPS}"]
    assert pipelined.config == load_config(QUICKSTART, pipelined.arguments[2:])
    tokenizer = load_tokenizer(pipelined.output / "tokenizer.json")
    assert (tokenizer.vocab_size, tokenizer.decode(tokenizer.encode(PROMPT))) == (400, PROMPT)


def test_alone_without_torchrun_the_losses_are_the_same(pipelined: Run, plain: Run) -> None:
    assert plain.finished.code == 0, plain.finished.err
    assert plain.losses[:STEPS] == pytest.approx(pipelined.losses, rel=1e-5)
    # Of the first step only: Adam's steps make much of rounding, and norms, unlike losses, of where the weights are.
    assert plain.rows[0]["grad_norm"] == pytest.approx(pipelined.rows[0]["grad_norm"], rel=1e-5)


def test_a_finished_run_started_again_changes_nothing(plain: Run, jobs: Jobs) -> None:
    before = (plain.output / "metrics.jsonl").read_bytes()
    again = jobs.run(*plain.arguments[1:])
    assert again.wait() == [0]
    assert again.said == f"{plain.output}: all {STEPS + 1} steps are done; raise train.steps to go on\n"
    assert (plain.output / "metrics.jsonl").read_bytes() == before


# ---- trace ----


def test_every_rank_traces_its_actions_and_transfers_in_order(pipelined: Run) -> None:
    plan = make_plan(pipelined.config).plan
    lines = pipelined.finished.out.splitlines()
    for rank in (0, 1):
        traced = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert traced == [f"[rank {rank}] {shown(action)}" for action in plan.ranks[rank]] * STEPS
    # No line ran into another rank's.
    traced_line = r"\[rank [01]\] \S+(  (──▶|◀──) rank [01])?"
    told = r"(slimpipe|layers by|carriers|vocabulary|tokens|memory by rank|  rank|     \d|schedule|checkpoint).*"
    known = re.compile(rf"{traced_line}|step \d/{STEPS}  loss .*|{told}")
    assert [line for line in lines if not known.fullmatch(line)] == []


def shown(action: Action) -> str:
    arrow = "──▶" if action.op.is_send else "◀──" if action.op.is_recv else None
    return f"{action}  {arrow} rank {action.peer}" if arrow else str(action)


# ---- checkpoint and generate ----


@pytest.fixture(scope="module")
def trained_weights(pipelined: Run) -> dict[str, Tensor]:
    """What the checkpoint holds, read by DCP alone: `model.` weights by name."""
    return {name.removeprefix("model."): tensor for name, tensor in stored(pipelined) if name.startswith("model.")}


def stored(run: Run) -> Iterator[tuple[str, Tensor]]:
    folder = run.output / "checkpoints" / f"step_{STEPS}"
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    yield from state.items()


def spec_of(config: Config) -> LlamaSpec:
    model = config.model
    return LlamaSpec(
        layers=model.layers,
        hidden=model.hidden_size,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        intermediate=model.intermediate_size,
        vocab=model.vocab_size,
        tied=model.tie_embeddings,
    )


def test_the_checkpointed_model_has_the_loss_of_the_session(
    pipelined: Run, plain: Run, trained_weights: dict[str, Tensor]
) -> None:
    """After `STEPS` steps on two ranks: by the reference what the plain run found in its next step."""
    config = pipelined.config
    data = open_data(config.data, config.model.vocab_size, config.train.seed, progress=False)
    batch = data.train.batch(STEPS, config.train.global_batch)
    loss, _ = reference_loss_and_grads(spec_of(config), trained_weights, *batch, torch.float64)
    assert plain.losses[STEPS] == pytest.approx(float(loss), rel=1e-5)


def test_the_checkpoint_holds_moments_of_every_weight_and_the_step(
    pipelined: Run, trained_weights: dict[str, Tensor]
) -> None:
    state = dict(stored(pipelined))
    moments = {f"optimizer.{name}.{moment}" for name in trained_weights for moment in ("exp_avg", "exp_avg_sq")}
    others = {"step", "optimizer.updates", "random.0", "random.1"}
    assert state.keys() == others | moments | {f"model.{name}" for name in trained_weights}
    assert int(state["step"]) == int(state["optimizer.updates"]) == STEPS
    assert all(state[name].abs().sum() > 0 for name in moments)


def complete(output: Path, max_tokens: int = 24, temperature: float = 0.8, top_k: int = 40, seed: int = 0) -> str:
    return generation.generate(output, PROMPT, max_tokens, temperature, top_k, seed, "cpu")


def test_generate_completes_a_prompt_the_same_under_a_seed(pipelined: Run) -> None:
    arguments = ["generate", str(pipelined.output), "--prompt", PROMPT, "--max-tokens", "24", "--seed", "5"]
    finished = slimpipe(*arguments, "--device", "cpu")
    assert (finished.code, finished.err) == (0, "")
    assert finished.out.startswith(PROMPT) and len(finished.out) > len(PROMPT) + 1
    assert finished.out == complete(pipelined.output, seed=5) + "\n"
    assert complete(pipelined.output, seed=5) != complete(pipelined.output, seed=6)


def test_generate_at_temperature_zero_takes_the_likeliest(pipelined: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = complete(pipelined.output, temperature=0, seed=1)
    assert greedy == complete(pipelined.output, temperature=0, seed=2)
    pick = generation._pick
    monkeypatch.setattr(generation, "_pick", lambda logits, *rest: int(logits.sort().indices[-1]))
    assert greedy == complete(pipelined.output)
    monkeypatch.setattr(generation, "_pick", pick)
    assert greedy == complete(pipelined.output, temperature=2.0, top_k=1)


def test_generation_sees_the_trained_models_logits(
    pipelined: Run, trained_weights: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token at a time over its cache, against the reference on the whole text at once."""
    # After so few steps attention is still flat, and a wrong position would hardly show: larger weights sharpen it.
    weights = {name: 4 * weight if weight.dim() > 1 else weight for name, weight in trained_weights.items()}
    shutil.copytree(pipelined.output, tmp_path, dirs_exist_ok=True)
    state = {f"model.{name}": checkpoint.Part.whole(weight) for name, weight in weights.items()}
    checkpoint.write(checkpoint.place(tmp_path, STEPS + 1), state, {}, checkpoint.Peers())
    made: list[int] = []
    chances: list[float] = []

    def pick(logits: Tensor, *_: Any) -> int:
        made.append(7 * len(made) % 400 + 1)  # neither likely nor the end of the text
        chances.append(float(torch.log_softmax(logits.double(), -1)[made[-1]]))
        return made[-1]

    monkeypatch.setattr(generation, "_pick", pick)
    complete(tmp_path, max_tokens=20)
    prompt = load_tokenizer(tmp_path / "tokenizer.json").encode(PROMPT)
    text = torch.tensor([prompt + made])
    labels = text[:, 1:].clone()
    labels[:, : len(prompt) - 1] = IGNORED
    loss, _ = reference_loss_and_grads(spec_of(pipelined.config), weights, text[:, :-1], labels, torch.float64)
    assert len(made) >= 20
    assert -sum(chances) / len(chances) == pytest.approx(float(loss), rel=1e-5)


def test_generate_refuses_a_prompt_beyond_the_trained_length(pipelined: Run) -> None:
    result = CliRunner().invoke(app, ["generate", str(pipelined.output), "--prompt", PROMPT * 20, "--device", "cpu"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.fullmatch(r"--prompt: \d+ tokens, .* sequences of 64; use a shorter prompt\n", result.stderr)
