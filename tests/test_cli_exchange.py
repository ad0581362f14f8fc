"""`slimpipe simulate --exchange`: what it reports and what it refuses in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.test_cli import assert_refused, run_line

ROOT = Path(__file__).parents[1]
H200 = ROOT / "configs/hardware/h200_facts.yaml"
MODEL = ROOT / "configs/llama_16l.yaml"
HARDWARE = f"--hardware {H200} --model {MODEL}"


def report(options: str) -> dict[str, Any]:
    result = run_line(f"simulate {options} --json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize(("mode", "idle"), [("off", 0.164), ("pairwise", 0.109), ("balanced", 0.0044)])
def test_json(mode: str, idle: float) -> None:
    """Idle shares of test_exchange_simulate.py's first row."""
    found = report(f"--pp 4 --slices 16 --microbatches 4 --attention-share 0.8 --exchange {mode}")
    assert found["bubble_fraction"] == pytest.approx(idle, abs=0.001)
    assert (found["exchange"], found["time_unit"]) == (mode, "forwards")
    assert len(found["exchange_bytes"]) == 4
    if mode == "off":
        assert (found["loans"], max(found["exchange_bytes"])) == (0, 0.0)
        assert found["max_imbalance_kv_slices"] > 10
    elif mode == "pairwise":
        assert 0 < max(found["exchange_bytes"]) <= found["exchange_bytes_bound"] == pytest.approx(1.5625)
    else:
        assert found["loans"] > 200
        assert 0 <= found["max_imbalance_kv_slices"] <= 0.25
        assert found["exchange_granule"] == 0.25


def test_json_without_costs_by_slice() -> None:
    """Equal costs leave nothing to share; other schedules neither."""
    for options in ("--pp 2", "--pp 2 --schedule 1f1b --attention-share 0.5"):
        found = report(f"{options} --microbatches 2")
        assert (found["exchange"], found["loans"], found["exchange_bytes"]) == ("off", 0, [0.0, 0.0])


def test_hardware() -> None:
    """Times in seconds, K and V of 8 of 32 heads; slower links idle more, and all of it more than free transfers."""
    options = "--pp 2 --slices 16 --microbatches 2 --exchange balanced"
    fast = report(f"{options} {HARDWARE} --sequence 131072")
    nccl = report(
        f"{options} --sequence 131072 --model {MODEL} --hardware {ROOT}/configs/hardware/h200_facts_nccl.yaml"
    )
    off = report(f"--pp 2 --slices 16 --microbatches 2 {HARDWARE} --sequence 131072")
    assert fast["time_unit"] == "seconds"
    assert 0.005 < fast["bubble_fraction"] < nccl["bubble_fraction"] < off["bubble_fraction"]
    assert fast["loans"] >= nccl["loans"] > off["loans"] == 0
    assert max(fast["exchange_bytes"]) < 1.4
    shared = report(f"{options} {HARDWARE} --attention-share 0.8")
    assert shared["makespan"] > 0


def test_exchange_with_vocabulary_and_grid() -> None:
    options = "--pp 3 --slices 6 --microbatches 1 --attention-share 0.8 --exchange balanced"
    result = run_line(f"simulate {options} --vocab parallel --head-share 0.1 --grid")
    assert result.exit_code == 0
    assert "loans, balanced" in result.stdout
    assert "XF0.5" in result.stdout and "S0.5" in result.stdout


def test_draw(tmp_path: Path) -> None:
    path = tmp_path / "out.svg"
    assert run_line(f"draw --pp 3 --slices 6 --attention-share 0.8 --exchange balanced -o {path}").exit_code == 0
    assert ">help</text>" in path.read_text()


@pytest.mark.parametrize("command", ["simulate", "draw"])
@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--exchange some", "--exchange = some: must be one of off, pairwise, balanced"),
        (
            "--exchange balanced",
            "--exchange = balanced: needs --attention-share above 0, or --hardware and --model",
        ),
        (
            "--exchange pairwise --attention-share 0",
            "--exchange = pairwise: needs --attention-share above 0, or --hardware and --model",
        ),
        (
            "--exchange balanced --attention-share 0.5 --schedule 1f1b",
            "--exchange = balanced: needs --schedule slimpipe, whose ranks are in phase",
        ),
        (f"--hardware {H200}", f"--hardware = {H200}: needs --model, whose sizes it is applied to"),
        ("--sequence 4096", "--sequence = 4096: says something with --hardware alone; leave it out"),
        (f"--model {MODEL}", f"--model = {MODEL}: says something with --hardware alone; leave it out"),
        (f"{HARDWARE} --slices 6", "--sequence = 65536: not divisible by --slices = 6"),
        (
            "--exchange balanced --attention-share 1.5",
            "--attention-share = 1.5: must be a number >= 0 and <= 1",
        ),
        (
            f"{HARDWARE} --pp 3 --slices 16",
            "--exchange needs stages of equally many layers: stage 0 has 6 and stage 1 has 5; use a multiple of "
            "the 3 stages (--pp x --virtual-stages) for model.layers, equal pipeline.layers_per_stage, "
            "or --exchange = off",
        ),
    ],
)
def test_refusals(command: str, options: str, line: str) -> None:
    assert_refused(run_line(f"{command} {options}"), line)
