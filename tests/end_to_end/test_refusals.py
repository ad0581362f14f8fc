"""What a user got wrong is told in one line with the key, its value and the remedy, before any process group starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from slimpipe.cli import app
from slimpipe.config import load_config
from slimpipe.parallel.mesh import Processes
from slimpipe.train.main import _agree, _claim
from tests.end_to_end.launch import QUICKSTART, slimpipe
from tests.support.pool import Pool

MODELS = "tests.support.failing_models"


@pytest.fixture(autouse=True)
def joined(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Attempts at joining a job: none of these tests may get there."""
    attempts: list[str] = []

    def refuse(*_: Any, **__: Any) -> None:
        attempts.append("a process group")
        raise AssertionError("a process group was started")

    monkeypatch.setattr(dist, "init_process_group", refuse)
    monkeypatch.setattr(dist, "rendezvous", refuse)
    return attempts


@pytest.fixture
def first_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun has it on rank 0 of the quickstart's two."""
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def told(joined: list[str], tmp_path: Path) -> Callable[..., str]:
    """`told(config, override, ...)`: the one line that `slimpipe train` says, having refused."""

    def train(config: str | Path, *overrides: str) -> str:
        result = CliRunner().invoke(app, ["train", str(config), *overrides, f"train.output={tmp_path / 'run'}"])
        assert (result.exit_code, result.stdout) == (2, ""), result.output
        # Where data was prepared first, the bars of that stand above the line.
        lines = [line for line in result.stderr.splitlines() if not line.startswith("data: ")]
        assert len(lines) == 1, result.stderr
        assert not joined and not dist.is_initialized() and not (tmp_path / "run").exists()
        return lines[0]

    return train


# ---- settings ----


@pytest.mark.parametrize(
    ("text", "place", "remedy"),
    [
        ("model: {layers: 8\ntrain: {}\n", "line 2", ""),
        ("model:\n  layers: 8\n layers: 8\n", "line 3", ""),
        ("model:\n\tlayers: 8\n", "line 2", ""),
        ("model: &a [*a]\n", "", "not settings: Circular reference"),
        ("model: " + "[" * 5000, "", "not settings: nested too deeply"),
        ("model: {layers: !!int x}\n", "", "not settings: invalid literal"),
        ("- model\n", "", "must be a mapping of the sections model, parallel, pipeline,"),
    ],
    ids=["unclosed", "indented", "tab", "circle", "depth", "wrong tag", "a list"],
)
def test_malformed_yaml(text: str, place: str, remedy: str, told: Callable[..., str], tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(text)
    line = told(config)
    assert line.startswith(f"{config}") and place in line and remedy in line


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["data.sequence_length=512", "pipeline.slices=3"],
            "pipeline.slices = 3: sequence length 512 is not divisible by 3; use a divisor (2, 4, 8)",
        ),
        (
            ["parallel.pp=4", "pipeline.virtual_stages=2", "pipeline.slices=2"],
            "pipeline.virtual_stages = 2 needs pipeline.slices >= parallel.pp (4): pipeline.slices = 2; use 4, 8,",
        ),
        (["parallel.pp=4", "model.layers=3"], "model.layers = 3: "),
        (["parallel.pp=4", "pipeline.virtual_stages=4", "pipeline.slices=4"], "model.layers = 8: "),
        (["parallel.pp=2", "train.global_batch=3", "train.micro_batch=2"], "train.global_batch = 3: "),
    ],
    ids=["slices", "virtual stages", "layers", "layers of chunks", "batch"],
)
def test_settings_that_do_not_fit_each_other(overrides: list[str], line: str, told: Callable[..., str]) -> None:
    said = told(QUICKSTART, *overrides)
    assert said.startswith(line)
    assert any(remedy in said for remedy in ("use ", "set ", "raise ", "lower ", "at least", "at most")), said


@pytest.mark.parametrize(("world", "here"), [(None, "1 process"), ("3", "3 processes")])
def test_a_wrong_number_of_processes(
    world: str | None, here: str, told: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if world is not None:
        monkeypatch.setenv("WORLD_SIZE", world)
    command = f"torchrun --nproc-per-node 2 -m slimpipe train {QUICKSTART} train.output={tmp_path / 'run'}"
    assert told(QUICKSTART) == f"parallel.pp = 2: pp 2 needs 2 processes, but here runs {here}; use: {command}"


# ---- data ----


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """A corpus of a few hundred words."""
    text = tmp_path / "tiny.txt"
    text.write_text("".join(f"The square of {i} is {i * i}.\n" for i in range(100)))
    return [f"data.corpus={text}", f"data.cache_dir={tmp_path / 'cache'}"]


@pytest.mark.usefixtures("first_of_two")
def test_too_few_tokens(tiny: list[str], told: Callable[..., str]) -> None:
    said = told(QUICKSTART, *tiny, "model.vocab_size=300", "data.sequence_length=512", "train.global_batch=8")
    assert said.startswith(f"{tiny[0].replace('=', ' = ')}: ") and " tokens, needs at least 4097 " in said
    assert said.endswith("use a larger corpus or lower train.global_batch or data.sequence_length")


@pytest.mark.usefixtures("first_of_two")
def test_too_little_text_for_the_vocabulary(tiny: list[str], told: Callable[..., str]) -> None:
    said = told(QUICKSTART, *tiny)
    assert (
        said.startswith("model.vocab_size = 2048: ") and "use a larger corpus, or model.vocab_size of at most" in said
    )


@pytest.mark.usefixtures("first_of_two")
def test_no_such_corpus(told: Callable[..., str], tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    said = told(QUICKSTART, f"data.corpus={missing}", f"data.cache_dir={tmp_path / 'cache'}")
    assert said == f"data.corpus = {missing}: no such file or folder; use a path or python_stdlib"


# ---- a model of the user's own ----


@pytest.mark.usefixtures("first_of_two")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_package.model:Model", "No module named 'no_such_package'; use llama or an importable"),
        (f"{MODELS}:NoSuchModel", "has no attribute 'NoSuchModel'; use llama or an importable"),
        (f"{MODELS}:WithoutHead", "the model has no module `head`; see slimpipe/models/contract.py"),
        (f"{MODELS}:WithoutOutputWeight", "`head` has no parameter `weight` of shape ["),
        (f"{MODELS}:WithAnotherVocabulary", "[vocab, hidden]; its shape is [7, "),
        (f"{MODELS}:WithABuffer", "the model has a buffer `scale`, whose values are lost"),
        (f"{MODELS}:WithAFrozenWeight", "parameter embedding.weight requires no gradient, but every weight is trained"),
        (f"{MODELS}:WithoutASlice", "layers.2 has forward(input: torch.Tensor) -> torch.Tensor, which is called as"),
        (f"{MODELS}:misbehave", "not a class of torch.nn.Module"),
        ("a.path/to:Model", "unknown model; must be llama or package.module:Class"),
    ],
    ids=[
        "no module",
        "no class",
        "no head",
        "no output weight",
        "odd vocabulary",
        "buffer",
        "frozen",
        "no slice",
        "function",
        "no name",
    ],
)
def test_a_model_that_is_not_there_or_breaks_the_contract(
    name: str, reason: str, small: list[str], told: Callable[..., str]
) -> None:
    said = told(QUICKSTART, *small, f"model.name={name}")
    assert said.startswith(f"model.name = {name}: ") and reason in said


@pytest.mark.usefixtures("first_of_two")
def test_a_model_of_other_layers_than_the_settings(small: list[str], told: Callable[..., str]) -> None:
    said = told(QUICKSTART, *small, f"model.name={MODELS}:OneLayerShort")
    assert said == f"model.layers = 8: {MODELS}:OneLayerShort built 7 layers; make them agree"


# ---- as a process ----


def test_a_real_process_says_the_line_and_nothing_else(tiny: list[str], tmp_path: Path) -> None:
    overrides = [*tiny, "parallel.pp=1", "model.vocab_size=300", f"train.output={tmp_path / 'run'}"]
    finished = slimpipe("train", QUICKSTART, *overrides)
    assert (finished.code, finished.out) == (2, "")
    (line,) = [line for line in finished.err.splitlines() if not line.startswith("data: ")]  # progress of the build
    assert line.startswith("data.corpus = ") and line.endswith("data.sequence_length")


# ---- ranks among each other ----


def agreement(rank: int, world: int, rates: list[str], fingerprints: list[str]) -> str | None:
    """What a rank says to its own settings and tokens beside the others'."""
    config = load_config(QUICKSTART, [f"optim.lr={rates[rank]}"])
    try:
        _agree(config, fingerprints[rank], Processes(rank, world, torch.device("cpu"), None))
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("rates", "fingerprints", "said"),
    [
        (["1e-3"] * 3, ["a"] * 3, None),
        (["1e-3", "2e-3", "1e-3"], ["a"] * 3, "ranks [1] have other settings than rank 0; start every node with"),
        (["1e-3"] * 3, ["a", "b", "c"], "ranks [1, 2] have other tokens than rank 0; give every node the same corpus"),
    ],
    ids=["agreed", "settings", "tokens"],
)
def test_ranks_that_differ_are_named_on_every_rank(
    rates: list[str], fingerprints: list[str], said: str | None, pool: Callable[[int], Pool]
) -> None:
    for answer in pool(3).run(agreement, rates, fingerprints):
        assert answer is None if said is None else answer is not None and answer.startswith(said)


# ---- the run's folder ----


def test_an_output_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"train.output = .*/file/run: cannot be written \(Not a directory\); choose"):
        _claim(tmp_path / "file" / "run")


def test_two_runs_at_once_do_not_share_a_folder(tmp_path: Path) -> None:
    first = _claim(tmp_path / "run")
    with pytest.raises(ValueError, match="another run is writing there; choose another folder"):
        _claim(tmp_path / "run")
    first.release()
    _claim(tmp_path / "run").release()
