"""`train.init_from`: first weights are those of the source, whatever the layout, and each rank reads its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slimpipe.config import Config, load_config
from slimpipe.runtime.watchdog import Progress
from slimpipe.train import checkpoint
from slimpipe.train.checkpoint import Part, Peers
from slimpipe.train.init_from import refuse_source, start_from
from slimpipe.train.session import Session
from slimpipe.weights.safetensors_file import StoredTensor
from tests.end_to_end.launch import QUICKSTART
from tests.numerics.harness import copies, gathered
from tests.support.hugging_face import LLAMA3, PLAIN, logits, random_tensors, write_folder
from tests.support.jobs import Jobs
from tests.support.pool import Pool

SEQUENCE = 64
OURS = {
    "layers": 4,
    "hidden_size": 48,
    "heads": 4,
    "kv_heads": 2,
    "intermediate_size": 72,
    "vocab_size": 301,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position": 64,
    },
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "p1": (1, {"slices": 4}),
    "p2 v2 vocab": (2, {"slices": 4, "virtual_stages": 2, "vocab_parallel": True}),
    "p2 1f1b": (2, {"schedule": "1f1b"}),
}


def settings(
    source: Path, output: Path, pp: int, pipeline: dict[str, Any], dtype: str = "float32", **model: Any
) -> Config:
    return Config.from_dict(
        {
            "model": {**OURS, **model},
            "parallel": {"pp": pp},
            "pipeline": pipeline,
            "data": {"corpus": "unused", "sequence_length": SEQUENCE},
            "train": {
                "steps": 2,
                "output": str(output),
                "global_batch": 2,
                "device": "cpu",
                "init_from": str(source),
                "dtype": dtype,
            },
        }
    )


@dataclass(frozen=True)
class Started:
    weights: dict[str, Tensor]
    cut: tuple[str, ...]
    loss: float
    lines: list[str]
    bytes_read: int


def start(rank: int, world: int, config: Config) -> Started:
    read: list[int] = []
    rows = StoredTensor.rows

    def counted(tensor: StoredTensor, first: int, count: int) -> Tensor:
        found = rows(tensor, first, count)
        read.append(found.nbytes)
        return found

    session = Session(config)
    StoredTensor.rows = counted  # type: ignore[method-assign]
    try:
        refuse_source(config)
        lines = start_from(config, session, Peers.of_job("test", 60), Progress())
    finally:
        StoredTensor.rows = rows  # type: ignore[method-assign]
    loss = session.evaluation.run([batch()])
    assert loss is not None
    return Started(copies(session.weights()), tuple(session.shards), loss.loss, lines, sum(read))


def batch() -> tuple[Tensor, Tensor]:
    text = torch.randint(301, (2, SEQUENCE + 1), generator=torch.Generator().manual_seed(3))
    return text[:, :-1], text[:, 1:]


def expected_loss(config: dict[str, Any], tensors: dict[str, Tensor]) -> float:
    tokens, labels = batch()
    found = torch.cat([logits(config, tensors, row) for row in tokens])
    return float(torch.nn.functional.cross_entropy(found, labels.flatten()))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_from_hugging_face(layout: str, tied: bool, tmp_path: Path, pool: Callable[[int], Pool]) -> None:
    there = {**PLAIN, **LLAMA3, "tie_word_embeddings": tied}
    tensors = random_tensors(there)
    source = write_folder(tmp_path / "there", there, tensors, files=3)
    pp, pipeline = LAYOUTS[layout]
    ranks = pool(pp).run(start, settings(source, tmp_path / "run", pp, pipeline, tie_embeddings=tied))
    weights = gathered("weight", (rank.weights for rank in ranks), ranks[0].cut)
    at = "model.layers.2."
    fused = torch.cat([tensors[f"{at}self_attn.{what}_proj.weight"] for what in "qkv"])
    assert torch.equal(weights["layers.2.attention.qkv.weight"], fused)
    assert torch.equal(weights["embedding.weight"], tensors["model.embed_tokens.weight"])
    assert ranks[0].loss == pytest.approx(expected_loss(there, tensors), rel=1e-5)
    assert ranks[0].lines == [f"weights from {source}"]
    # Every rank what it holds and no more: a tied table without vocabulary parallelism is on the first and the last.
    for rank in ranks:
        assert rank.bytes_read == 4 * sum(weight.numel() for weight in rank.weights.values())
    total = sum(tensor.nbytes for tensor in tensors.values())
    twice = tensors["model.embed_tokens.weight"].nbytes if tied and layout == "p2 1f1b" else 0
    assert sum(rank.bytes_read for rank in ranks) == total + twice


def write_checkpoint(folder: Path, config: Config) -> dict[str, Tensor]:
    """fp32 weights that bf16 cannot hold, as a checkpoint of a run."""
    weights = {name: 0.2 * torch.randn(part.size) for name, part in Session(one_rank(config)).state().items()}
    weights = {name: weight for name, weight in weights.items() if name.startswith("model.")}
    note = {"format": 1, "step": 7, "settings": config.model_dump(mode="json")}
    state = {name: Part.whole(weight) for name, weight in weights.items()}
    checkpoint.write(checkpoint.place(folder, 7), state, note, Peers())
    return {name.removeprefix("model."): weight for name, weight in weights.items()}


def one_rank(config: Config) -> Config:
    return Config.from_dict(
        {
            **{name: getattr(config, name).record() for name in type(config).model_fields},
            "parallel": {},
            "pipeline": {"slices": 1},
        }
    )


def masters(rank: int, world: int, config: Config) -> tuple[dict[str, Tensor], dict[str, Tensor], float, list[str]]:
    session = Session(config)
    refuse_source(config)
    lines = start_from(config, session, Peers.of_job("test", 60), Progress())
    state = session.state()
    moments = sum(float(part.tensor.abs().sum()) for name, part in state.items() if name.startswith("optimizer."))
    found = {name.removeprefix("model."): part.tensor for name, part in state.items() if name.startswith("model.")}
    return copies(found), copies(session.weights()), moments, lines


def test_from_a_checkpoint_masters_keep_what_bf16_cannot_hold(tmp_path: Path, pool: Callable[[int], Pool]) -> None:
    """Saved by one rank, started on two with a vocabulary in rows; moments and steps are a new run's."""
    pp, pipeline = LAYOUTS["p2 v2 vocab"]
    source = tmp_path / "there"
    config = settings(source, tmp_path / "run", pp, pipeline, "bfloat16")
    expected = write_checkpoint(source, config)
    for rank, (wide, low, moments, lines) in enumerate(pool(pp).run(masters, config)):
        assert moments == 0
        assert lines == [f"weights from {source}"]
        for name, weight in wide.items():
            rows = 151 if name in ("embedding.weight", "head.weight") else 0
            whole = expected[name]
            mine = whole if not rows else whole[rank * rows : (rank + 1) * rows]
            assert torch.equal(weight, mine), name
            assert torch.equal(low[name], mine.bfloat16()), name
            assert not torch.equal(low[name].float(), mine)


def test_what_may_differ_is_told(tmp_path: Path, pool: Callable[[int], Pool]) -> None:
    source = write_folder(tmp_path / "there", {**PLAIN, **LLAMA3}, random_tensors(PLAIN))
    config = settings(source, tmp_path / "run", 1, {"slices": 4}, rope_theta=8e6)
    (started,) = pool(1).run(start, config)
    assert started.lines == [
        f"weights from {source}",
        "model.rope_theta = 8000000.0: those weights were trained with 500000.0",
    ]


BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"heads": 8, "head_dim": 12},
        {},
        "model.heads = 8: the weights of train.init_from = {source} were trained with 4; set",
    ),
    ({"tie_embeddings": True}, {}, "model.tie_embeddings = true: the weights of train.init_from = {source} were"),
    (
        {"vocab_size": 302},
        {},
        "model.vocab_size = 302: the weights of train.init_from = {source} were trained with 301;",
    ),
    ({"qk_norm": True}, {}, "model.qk_norm = true: the weights of train.init_from = {source} were trained with false;"),
    ({}, {"attention_bias": True}, "train.init_from = {source}: {source}/config.json: attention_bias = true: biases"),
    (
        {},
        {"intermediate_size": 73},
        "model.intermediate_size = 72: the weights of train.init_from = {source} were trained with 73; set it so",
    ),
    (
        {"intermediate_size": 73},
        {"intermediate_size": 73},
        "train.init_from = {source}: {source}/model.safetensors: tensor model.layers.0.mlp.gate_proj.weight has shape "
        "[72, 48], config.json says [73, 48]",
    ),
]


@pytest.mark.parametrize(("ours", "theirs", "line"), BAD, ids=[line[:40] for *_, line in BAD])
def test_what_does_not_fit_is_refused_before_anything_starts(
    ours: dict[str, Any], theirs: dict[str, Any], line: str, tmp_path: Path
) -> None:
    source = write_folder(tmp_path / "there", {**PLAIN, **LLAMA3, **theirs}, random_tensors(PLAIN))
    with pytest.raises(ValueError) as caught:
        refuse_source(settings(source, tmp_path / "run", 1, {}, **ours))
    assert str(caught.value).startswith(line.format(source=source))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "there"
    config = settings(source, tmp_path / "run", 1, {})
    write_checkpoint(source, config)
    refuse_source(config)
    with pytest.raises(ValueError, match=r"train.init_from = .*embedding.weight has shape \[301, 48\], .* \[302, 48\]"):
        note = checkpoint.place(source, 7) / "note.json"
        note.write_text(json.dumps({"format": 1, "settings": {}}))
        refuse_source(settings(source, tmp_path / "run", 1, {}, vocab_size=302))
    with pytest.raises(ValueError, match="train.init_from = [^:]*nothing: no such folder; give a run, a checkpoint or"):
        refuse_source(settings(tmp_path / "nothing", tmp_path / "run", 1, {}))


def test_a_damaged_checkpoint_is_refused_by_every_rank(tmp_path: Path, pool: Callable[[int], Pool]) -> None:
    pp, pipeline = LAYOUTS["p2 v2 vocab"]
    source = tmp_path / "there"
    config = settings(source, tmp_path / "run", pp, pipeline)
    write_checkpoint(source, config)
    file = next(checkpoint.place(source, 7).glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    told = pool(pp).run(refused, config)
    assert told[0] == told[1]
    assert told[0].startswith(f"train.init_from = {source}: ") and "is damaged" in told[0]


def refused(rank: int, world: int, config: Config) -> str:
    session = Session(config)
    with pytest.raises(ValueError) as caught:
        start_from(config, session, Peers.of_job("test", 60), Progress())
    return str(caught.value)


def test_a_run_starts_from_another_and_goes_on_from_its_own_checkpoints(
    jobs: Jobs, small: list[str], tmp_path: Path
) -> None:
    """The first run trains a little; the second begins with its weights at another layout, and once it has a checkpoint
    of its own never looks at them again."""
    shared = [*small, "data.eval_share=0.1", "train.eval_batches=2", "model.layers=4", "model.hidden_size=32"]
    first, second = tmp_path / "first", tmp_path / "second"
    run = [QUICKSTART, *shared, "optim.lr=1e-2", "train.steps=4", "train.eval_every=4", f"train.output={first}"]
    job = jobs.run(*run, "parallel.pp=1")
    assert job.wait() == [0], job.said

    run = [QUICKSTART, *shared, "optim.lr=1e-9", "optim.min_lr=0", "train.eval_every=1"]
    run += [f"train.output={second}", f"train.init_from={first}"]
    job = jobs.run(*run, "train.steps=1", ranks=2)
    assert job.wait() == [0, 0], job.said
    assert f"weights from {first}" in job.said
    trained, started = (evaluations(folder) for folder in (first, second))
    assert started[1] == pytest.approx(trained[4], rel=1e-5)

    gone = [word.replace(str(first), str(tmp_path / "gone")) for word in run]
    job = jobs.run(*gone, "train.steps=2", ranks=2)
    assert job.wait() == [0, 0], job.said
    assert "resumed from" in job.said and "weights from" not in job.said

    assert load_config(second / "config.yaml").train.init_from == str(tmp_path / "gone")


def evaluations(run: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}
