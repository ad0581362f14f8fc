"""The command line: what it prints, what it refuses in one line, what it hands on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slimpipe.cli import app
from slimpipe.config import Config
from slimpipe.data import DataError

ROOT = Path(__file__).parents[1]
QUICKSTART = str(ROOT / "configs/quickstart.yaml")


@pytest.fixture(autouse=True)
def _no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def run_line(line: str) -> Any:
    return run(*line.split())


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A real process, in the repository, outside of torchrun."""
    kept = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=ROOT,
        env={**kept, "PYTHONPATH": str(ROOT), **environment},
    )


def assert_refused(result: Any, line: str) -> None:
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"{line}\n")


# ---- simulate ----


def test_simulate_json() -> None:
    result = run_line("simulate --schedule slimpipe --pp 8 --slices 16 --virtual-stages 5 --microbatches 8 --json")
    report = json.loads(result.stdout)
    assert report["bubble_fraction"] == pytest.approx(7 / (8 * 16 * 5 + 7))
    assert report["peak_units"] == [16 * 5 + 2 * (7 - rank) for rank in range(8)]
    assert report["makespan"] == pytest.approx(3 * (8 * 16 * 5 + 7))
    assert report["idle"] == pytest.approx([3 * 7] * 8)
    assert report["peak_activation"] == pytest.approx((1 + 2 * 7 / 80) / 8)
    assert report["formula"] == pytest.approx(
        {"bubble_fraction": report["bubble_fraction"], "peak_activation": report["peak_activation"]}
    )
    assert [len(chunks) for chunks in report["kv_slots"]] == [5] * 8
    assert {key: report[key] for key in ("schedule", "pp", "slices", "virtual_stages", "microbatches")} == {
        "schedule": "slimpipe",
        "pp": 8,
        "slices": 16,
        "virtual_stages": 5,
        "microbatches": 8,
    }


def test_simulate_with_costs_by_slice() -> None:
    """Attention 80 % of the forward, p, n, v, m = 2, 16, 1, 2, no exchange: 8.5 % idle."""
    options = "simulate --pp 2 --slices 16 --microbatches 2 --json"
    sliced = json.loads(run_line(f"{options} --attention-share 0.8").stdout)
    assert sliced["bubble_fraction"] == pytest.approx(0.085, abs=0.002)
    dense = json.loads(run_line(f"{options} --attention-share 0").stdout)
    assert dense["makespan"] == pytest.approx(json.loads(run_line(options).stdout)["makespan"])


def test_simulate_backward_cost() -> None:
    options = "simulate --pp 2 --microbatches 4 --schedule 1f1b --json --backward-cost"
    assert json.loads(run_line(f"{options} 1").stdout)["makespan"] == pytest.approx(2 * (4 + 1))
    assert json.loads(run_line(f"{options} 2.5").stdout)["makespan"] == pytest.approx(3.5 * (4 + 1))


def test_simulate_table_and_grid() -> None:
    result = run_line("simulate --schedule gpipe --pp 2 --microbatches 2 --backward-cost 1 --grid")
    assert result.exit_code == 0
    assert "gpipe: p 2, v 1, n 1, m 2" in result.stdout and "33.33%" in result.stdout
    assert "rank 0  F0.0  F1.0     .     .  B0.0  B1.0" in result.stdout


def test_simulate_grid_inside_json() -> None:
    report = json.loads(run_line("simulate --pp 2 --microbatches 1 --json --grid").stdout)
    assert [line.split()[0] for line in report["grid"]] == ["tick", "rank", "rank"]


def test_simulate_output_layer() -> None:
    """slimpipe, p = 4, n = 16: 64 slices of 4 stages, an output layer of 0.4 forwards. On the last rank it adds
    3 x 0.4 to each of its slices; in passes a quarter of that to each rank, and nobody waits for it."""
    options = "simulate --pp 4 --slices 16 --json"
    off, last, parallel = (
        json.loads(run_line(f"{options} {vocab}").stdout)
        for vocab in ("", "--vocab last --head-share 0.4", "--vocab parallel --head-share 0.4")
    )
    assert last["makespan"] == pytest.approx(off["makespan"] + 64 * 1.2)
    assert parallel["makespan"] == pytest.approx(off["makespan"] + 64 * 0.3)
    assert [report["logits_shards"] for report in (off, last, parallel)] == [[0] * 4, [0] * 4, [1] * 4]
    assert [(report["vocab"], report["head_share"]) for report in (off, parallel)] == [("off", None), ("parallel", 0.4)]
    assert {report["peak_activation"] for report in (off, last, parallel)} == {off["peak_activation"]}


def test_simulate_output_layer_where_attention_grows() -> None:
    """Places are chosen by the costs that are simulated: ranks idle no more than without the output layer."""
    options = "simulate --pp 8 --slices 32 --attention-share 0.6 --json"
    off = json.loads(run_line(options).stdout)
    parallel = json.loads(run_line(f"{options} --vocab parallel --head-share 0.25").stdout)
    assert parallel["bubble_fraction"] < off["bubble_fraction"]


def test_simulate_output_layer_table_and_grid() -> None:
    result = run_line("simulate --schedule 1f1b --pp 2 --microbatches 1 --vocab parallel --head-share 0.1 --grid")
    assert "1f1b: p 2, v 1, n 1, m 1, output layer parallel at 0.1" in result.stdout
    assert "rank 1     .  F0.0  S0.0  T0.0  B0.0     ." in result.stdout


@pytest.mark.parametrize("command", ["simulate", "draw"])
@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--pp 0", "--pp = 0: must be a whole number > 0"),
        ("--slices -1", "--slices = -1: must be a whole number > 0"),
        ("--backward-cost 0", "--backward-cost = 0.0: must be a number > 0"),
        ("--backward-cost nan", "--backward-cost = nan: must be a number > 0"),
        ("--attention-share 1.5", "--attention-share = 1.5: must be a number >= 0 and <= 1"),
        (
            "--attention-share 0.5 --backward-cost 2",
            "--backward-cost = 2.0: --attention-share sets it; leave one of them out",
        ),
        ("--vocab both", "--vocab = both: must be one of off, last, parallel"),
        ("--vocab last", "--vocab = last: needs --head-share, what the output layer costs"),
        ("--head-share 0.1", "--head-share = 0.1: --vocab = off costs nothing; use --vocab last or parallel"),
        ("--vocab last --head-share nan", "--head-share = nan: must be a number >= 0"),
        (
            "--pp 1 --vocab parallel --head-share 0.1",
            "--vocab = parallel needs --pp >= 2: one rank has nobody to share with",
        ),
    ],
)
def test_bad_options(command: str, options: str, line: str) -> None:
    assert_refused(run_line(f"{command} {options}"), line)


@pytest.mark.parametrize("command", ["simulate", "draw"])
@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            "--virtual-stages 2 --slices 2 --pp 4",
            "--virtual-stages = 2 needs --slices >= --pp (4): --slices = 2; use 4, 8, ... slices or "
            "--virtual-stages = 1",
        ),
        (
            "--schedule interleaved --pp 4 --virtual-stages 2 --microbatches 6",
            "--microbatches gives m = 6 microbatches: --schedule = interleaved needs a multiple of --pp (4); use a "
            "batch that gives 8, 12, ...",
        ),
        (
            "--schedule gpipe --slices 2",
            "--slices = 2: --schedule = gpipe runs whole microbatches; use --slices = 1 or --schedule = slimpipe",
        ),
        (
            "--schedule zb_v",
            "--schedule = zb_v: designed but not built; use one of gpipe, 1f1b, interleaved, slimpipe",
        ),
        ("--schedule zigzag", "--schedule = zigzag: unknown; use one of gpipe, 1f1b, interleaved, slimpipe"),
    ],
)
def test_bad_shapes(command: str, options: str, line: str) -> None:
    """The words are the schedule package's, and the names those of the options."""
    assert_refused(run_line(f"{command} {options}"), line)


# ---- draw ----


def test_draw(tmp_path: Path) -> None:
    target = tmp_path / "schedule.svg"
    result = run_line(f"draw --pp 4 --slices 8 --microbatches 2 -o {target}")
    assert (result.exit_code, result.stdout) == (0, f"wrote {target}\n")
    assert "<svg" in target.read_text()[:200]


def test_draw_output_layer(tmp_path: Path) -> None:
    target = tmp_path / "schedule.svg"
    run_line(f"draw --pp 2 --slices 4 --microbatches 1 --vocab parallel --head-share 1 -o {target}")
    assert "vocabulary passes" in target.read_text() and ">S3</text>" in target.read_text()


def test_draw_where_nothing_can_be_written(tmp_path: Path) -> None:
    target = tmp_path / "none" / "schedule.svg"
    assert_refused(run("draw", "-o", str(target)), f"--output = {target}: cannot be written: No such file or directory")


# ---- train ----


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The settings that training was started with; nothing is trained."""
    started: list[Config] = []
    monkeypatch.setattr("slimpipe.train.main.train", started.append)
    return started


def test_train_alone(trained: list[Config], tmp_path: Path) -> None:
    result = run("train", QUICKSTART, "parallel.pp=1", "optim.lr=1e-4", f"train.output={tmp_path}")
    assert result.exit_code == 0, result.output
    assert (trained[0].parallel.pp, trained[0].optim.lr) == (1, 1e-4)


def test_train_under_torchrun(trained: list[Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert run("train", QUICKSTART, "parallel.pp=4", f"train.output={tmp_path}").exit_code == 0
    assert trained[0].parallel.pp == 4


def test_train_needs_torchrun(trained: list[Config]) -> None:
    assert_refused(
        run("train", QUICKSTART, "parallel.pp=4"),
        "parallel.pp = 4: pp 4 needs 4 processes, but here runs 1 process; "
        f"use: torchrun --nproc-per-node 4 -m slimpipe train {QUICKSTART} parallel.pp=4",
    )
    assert not trained


def test_train_goes_on_where_a_run_is(trained: list[Config], tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert run("train", QUICKSTART, "parallel.pp=1", f"train.output={tmp_path}").exit_code == 0
    assert len(trained) == 1


def test_every_problem_is_told(trained: list[Config]) -> None:
    assert_refused(
        run("train", QUICKSTART, "pipeline.slice=4", "train.stepz=4"),
        "pipeline.slice: unknown key; did you mean pipeline.slices?\n"
        "train.stepz: unknown key; did you mean train.steps?",
    )
    assert not trained


def test_one_process_a_node_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    result = run("train", QUICKSTART, "pipeline.slices=7")
    assert (result.exit_code, result.output, len(waited)) == (2, "", 1)


@pytest.mark.parametrize(
    "error",
    [
        DataError("the corpus is empty"),
        ValueError("train.device = cuda: no GPU found; use train.device = cpu"),
    ],
)
def test_errors_of_the_users_in_training(error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(config: Config) -> None:
        raise error

    monkeypatch.setattr("slimpipe.train.main.train", fail)
    assert_refused(run("train", QUICKSTART, "parallel.pp=1", f"train.output={tmp_path}"), str(error))


@pytest.mark.parametrize("error", [ValueError("not enough values to unpack"), RuntimeError("train.x = 1: no")])
def test_bugs_keep_their_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(config: Config) -> None:
        raise error

    monkeypatch.setattr("slimpipe.train.main.train", fail)
    assert run("train", QUICKSTART, "parallel.pp=1", f"train.output={tmp_path}").exception is error


# ---- generate ----


def test_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    def complete(*arguments: Any) -> str:
        return f"text from {arguments}"

    monkeypatch.setattr("slimpipe.train.generate.generate", complete)
    result = run("generate", "runs/x", "--prompt", "def ", "--max-tokens", "3", "--seed", "7")
    assert result.stdout == f"text from {(Path('runs/x'), 'def ', 3, 0.8, 40, 7, 'auto')}\n"


def test_generate_from_no_run(tmp_path: Path) -> None:
    result = run("generate", str(tmp_path), "--prompt", "x")
    assert (result.exit_code, result.stdout) == (2, "")
    assert str(tmp_path) in result.stderr and result.stderr.count("\n") == 1


# ---- as a process ----


def test_python_m_slimpipe_tells_one_line() -> None:
    result = python("-m", "slimpipe", "train", "configs/quickstart.yaml", "pipeline.slices=7")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "pipeline.slices = 7: sequence length 256 is not divisible by 7; use a divisor (4, 8, 16)\n"
    )


def test_schedules_need_no_torch() -> None:
    """With torch made impossible to import."""
    code = "import sys; sys.modules['torch'] = None; from slimpipe.cli import app; app(['simulate', '--json'])"
    result = python("-c", code)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["pp"] == 4


def test_version_and_help() -> None:
    assert run("--version").stdout.startswith("slimpipe ")
    assert all(command in run("--help").stdout for command in ("train", "generate", "simulate", "draw"))
