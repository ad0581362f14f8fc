"""What a run records of itself: `metrics.jsonl`, TensorBoard, Weights & Biases; and how a skipped step shows."""

from __future__ import annotations

import gzip
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from slimpipe.cli import app
from slimpipe.config import load_config
from slimpipe.runtime.watchdog import Progress
from slimpipe.train.metrics import MetricsFile, TensorBoard, numbers, open_metrics
from slimpipe.train.planning import make_plan
from slimpipe.train.profiling import Profiling
from tests.end_to_end.launch import QUICKSTART
from tests.support.failing_models import MISBEHAVIOUR
from tests.watching.test_display import RECORD

ROOT = Path(__file__).parents[2]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Strict JSON: NaN and Infinity are none."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_rows_are_json_whatever_the_numbers(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    file.write(
        {"step": 1, "loss": math.nan, "grad_norm": math.inf, "waits": {"F": math.nan}, "by_rank": (1.0, math.nan)}
    )
    file.close()
    assert rows_of(tmp_path) == [
        {"step": 1, "loss": None, "grad_norm": None, "waits": {"F": None}, "by_rank": [1.0, None]}
    ]


def test_a_record_has_the_documented_fields_and_no_empty_ones() -> None:
    """Every field of a row stands in docs/metrics.md, as `field`, and no other."""
    full = {**RECORD.row(), "skipped": True, "notes": ["x"], "exchange": {}, "swap": {}, "carriers": "x"}
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    fields = page[page.index("| field |") :].split("\n\n")[0].splitlines()[2:]
    assert {line.split("`")[1] for line in fields} == full.keys()
    assert not {"skipped", "notes", "carriers"} & RECORD.row().keys()
    assert RECORD.row()["peak_memory_bytes"] == 100 * 2**30


def test_numbers_inside_lists_and_mappings_have_names() -> None:
    row = {"step": 3, "loss": 2.5, "waits": {"F": 0.1}, "by_rank": (7, 8), "notes": ("x",), "name": "y"}
    assert dict(numbers(row)) == {"loss": 2.5, "waits/F": 0.1, "by_rank/0": 7, "by_rank/1": 8}


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    file = MetricsFile(tmp_path, TensorBoard(tmp_path))
    for step in (1, 2):
        file.write({"step": step, "loss": 5.0 / step, "waits": {"F": 0.1 * step}})
    file.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 5.0), (2, 2.5)]
    assert [event.value for event in events.Scalars("waits/F")] == pytest.approx([0.1, 0.2])
    assert len(rows_of(tmp_path)) == 2


class Wandb(ModuleType):
    """Stands in for the package: the calls that are made of it."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.started: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def init(self, **options: Any) -> Wandb:
        self.started.append(options)
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    found = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", found)
    return found


def test_weights_and_biases_goes_on_under_one_id(wandb: Wandb, tmp_path: Path) -> None:
    """Against a stand-in of the package: a resumed run is the same run there."""
    config = load_config(QUICKSTART, ["log.wandb=long-contexts", f"train.output={tmp_path / 'run'}"])
    for step in (1, 2):
        file = open_metrics(config)
        file.write({"step": step, "loss": 1.5, "waits": {"F": 0.25}})
        file.close()
    assert [options["project"] for options in wandb.started] == ["long-contexts"] * 2
    first, second = (options["id"] for options in wandb.started)
    assert first == second and len(first) == 8
    assert wandb.started[0] | {"config": {}} == {
        "project": "long-contexts",
        "name": "run",
        "dir": str(tmp_path / "run"),
        "id": first,
        "resume": "allow",
        "config": {},
    }
    assert wandb.started[0]["config"]["optim"]["lr"] == 3e-3
    assert wandb.logged == [(step, {"loss": 1.5, "waits/F": 0.25}) for step in (1, 2)] and wandb.finished == 2


def test_without_the_key_nothing_is_told_to_anybody(wandb: Wandb, tmp_path: Path) -> None:
    open_metrics(load_config(QUICKSTART, [f"train.output={tmp_path}"])).close()
    assert wandb.started == []
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


# ---- a run ----


@pytest.fixture
def text(tmp_path: Path) -> list[str]:
    """A run of seconds, in this process."""
    (tmp_path / "text.txt").write_text("".join(f"The square of {i} is {i * i}.\n" for i in range(400)))
    return [
        *(f"data.{key}" for key in (f"corpus={tmp_path / 'text.txt'}", f"cache_dir={tmp_path / 'cache'}")),
        *("model.vocab_size=300", "data.sequence_length=64", "train.global_batch=2", "train.micro_batch=1"),
        *("parallel.pp=1", "model.layers=2", "train.steps=4", f"train.output={tmp_path / 'run'}"),
    ]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_a_skipped_step_is_counted_and_told_and_the_run_ends_well(
    text: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MISBEHAVIOUR, "poison 1 2 3")  # the third visit: the second step's first microbatch
    model = "model.name=tests.support.failing_models:Misbehaving"
    result = CliRunner().invoke(app, ["train", QUICKSTART, *text, model, "train.on_nonfinite=skip"])
    assert result.exit_code == 0, result.output
    rows = rows_of(tmp_path / "run")
    assert [row.get("skipped", False) for row in rows] == [False, True, False, False]
    assert rows[1]["loss"] is None and rows[1]["grad_norm"] is None and all(rows[i]["loss"] > 0 for i in (0, 2, 3))
    (note,) = rows[1]["notes"]
    assert note.startswith("skipped (train.on_nonfinite): loss nan, gradient norm nan; first bad parameter")
    assert f"step 2: {note}\n" in result.stdout
    # Nobody knows how many operations a model of one's own takes.
    assert "tflops" not in rows[0]


def test_chosen_steps_are_traced_with_every_action_by_name(text: list[str], tmp_path: Path) -> None:
    profile = ["train.profile.steps=[2, 4]", "pipeline.slices=4"]
    result = CliRunner().invoke(app, ["train", QUICKSTART, *text, *profile])
    assert result.exit_code == 0, result.output
    traces = sorted((tmp_path / "run/profile").iterdir())
    assert [path.name for path in traces] == ["step_2_rank_0.json.gz", "step_4_rank_0.json.gz"]
    events = json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"]
    ranges = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    plan = make_plan(load_config(QUICKSTART, [*text, *profile])).plan
    # In order, each once; and inside them the operators that they ran.
    assert [name for name in ranges if "." in name and "@" in name] == [str(action) for action in plan.ranks[0]]
    assert {"gradient norm", "optimizer", "reading data"} & set(ranges) == {"gradient norm", "optimizer"}
    assert any(event["name"] == "aten::mm" for event in events)


def test_a_rank_that_is_not_chosen_writes_no_trace(text: list[str], tmp_path: Path) -> None:
    config = load_config(QUICKSTART, [*text, "parallel.pp=2", "train.profile.steps=[1]", "train.profile.ranks=[1]"])
    progress = Progress()
    for rank in (0, 1):
        with Profiling(config, rank, progress).step(1):
            progress.now("F0.0@0")
        with Profiling(config, rank, progress).step(2):
            progress.now("F0.0@0")
    assert [path.name for path in (tmp_path / "run/profile").iterdir()] == ["step_1_rank_1.json.gz"]
    assert progress.listener is None


def test_alone_a_step_that_is_not_finite_stops_with_one_line(
    text: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MISBEHAVIOUR, "poison 1 2 3")
    model = "model.name=tests.support.failing_models:Misbehaving"
    result = CliRunner().invoke(app, ["train", QUICKSTART, *text, model])
    assert result.exit_code == 1 and len(rows_of(tmp_path / "run")) == 1
    (line,) = [line for line in result.stderr.splitlines() if not line.startswith("data: ")]
    assert line.startswith("step 2: loss nan, gradient norm nan; first bad parameter as the backward goes: ")
    assert list((tmp_path / "run/checkpoints").iterdir()) == []
