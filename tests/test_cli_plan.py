"""`slimpipe plan`: the search finds what trying everything finds, and what is wrong with a question is told."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from typer.testing import CliRunner

from slimpipe.cli import app
from slimpipe.config import Config, ConfigError, Recompute, load_config
from slimpipe.plan.hardware_file import load_hardware
from slimpipe.plan.predict import predict
from slimpipe.plan.swap import host_link
from slimpipe.schedule import PlanError
from slimpipe.train.forecast import ROOM, Forecast
from slimpipe.train.planning import make_plan
from slimpipe.train.search import KEYS, Found, Search
from slimpipe.train.swapping import plan_swaps
from tests.end_to_end.launch import ROOT

HARDWARE = ROOT / "configs/hardware/h200.yaml"
SETTINGS: dict[str, Any] = {
    "model": {
        "layers": 4,
        "hidden_size": 1024,
        "heads": 8,
        "kv_heads": 2,
        "intermediate_size": 2816,
        "vocab_size": 1024,
    },
    "parallel": {"pp": 2, "carrier": "nccl"},  # by whose memory the budgets below were chosen
    "pipeline": {"hardware": str(HARDWARE)},
    "data": {"corpus": "python_stdlib", "sequence_length": 4096},
    "train": {"steps": 1, "output": "unused", "global_batch": 2, "dtype": "bfloat16"},
}
MIB = 2**20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(SETTINGS), encoding="utf-8")
    return file


def everything(
    make: Any, device_bytes: int, slices: tuple[int, ...] = (2, 4), swap: tuple[str, ...] = ("off", "auto")
) -> list[tuple[float, tuple[str, ...]]]:
    """(seconds, overrides) of all settings that fit, by trying each."""
    hardware, device, found = load_hardware(HARDWARE), torch.device("cuda", 0), []
    values = (slices, (1,), ("off", "balanced"), get_args(Recompute), swap)
    for chosen in itertools.product(*values):
        overrides = tuple(f"{key}={value}" for key, value in zip(KEYS, chosen, strict=True))
        try:
            config = make(overrides)
            planned = plan_swaps(config, make_plan(config), device, assumed_bytes=device_bytes)
        except (ConfigError, PlanError):
            continue
        memory = Forecast(config, planned, device, device_bytes).memory
        if max(rank.total for rank in memory) <= (1 - ROOM) * device_bytes:
            links = planned.host_links(host_link(hardware))
            seconds = predict(config, planned.plan, planned.exchange, hardware, links).makespan
            found.append((seconds, overrides))
    return sorted(found)


def searched(path: Path, mib: int, keep: Sequence[str] = ()) -> Search:
    return Search(lambda overrides: load_config(path, overrides), load_hardware(HARDWARE), mib * MIB, keep)


def all_of(search: Search) -> list[Found]:
    return sorted((one for shape in search.shapes() for one in search.of_shape(*shape)), key=lambda one: one.seconds)


@pytest.mark.parametrize(("mib", "swap"), [(4096, "off"), (640, "auto")])
def test_it_finds_what_trying_everything_finds(mib: int, swap: str, path: Path) -> None:
    """Where all settings fit, and where only a few with swap do."""
    search = searched(path, mib, keep=["pipeline.virtual_stages"])
    assert search.shapes() == [(2, 1), (4, 1)]
    found, tried = all_of(search), everything(lambda overrides: load_config(path, overrides), mib * MIB)
    assert found[0].seconds == pytest.approx(tried[0][0], rel=1e-3)
    assert f"memory.swap={swap}" in found[0].overrides
    assert all(one.gpu_bytes <= (1 - ROOM) * mib * MIB for one in found)
    assert len(found) < len(tried)


@pytest.mark.parametrize("swap", [("off",), ("off", "auto")], ids=str)
def test_a_mode_that_fits_without_exchange_alone_does_not_end_it(swap: tuple[str, ...], path: Path) -> None:
    """3054 MiB: with nothing recomputed 3008 are needed, and with exchange 3100; that costs 7 %, norms 2."""
    longer = ["data.sequence_length=16384", "pipeline.slices=2"]
    keep = ["pipeline.slices", "pipeline.virtual_stages", *(["memory.swap"] if len(swap) == 1 else [])]

    def make(overrides: Sequence[str]) -> Config:
        return load_config(path, [*longer, *overrides])

    search = Search(make, load_hardware(HARDWARE), 3215 * MIB, keep)
    found, tried = all_of(search), everything(make, 3215 * MIB, (2,), swap)
    assert found[0].seconds == pytest.approx(tried[0][0], rel=1e-3)
    assert "pipeline.exchange=balanced" in found[0].overrides
    without = [one for one in found if "pipeline.exchange=off" in one.overrides]
    assert [one.overrides[3:] for one in without] == [("memory.recompute=none", "memory.swap=off")]


def test_what_it_tries(path: Path) -> None:
    """At least a slice a rank, of 1024 tokens or more; stages into which the layers divide; what is kept, alone."""
    assert searched(path, 4096).shapes() == [(n, v) for n in (2, 4) for v in (1, 2)]
    kept = searched(path, 4096, keep=["pipeline.slices", "memory.recompute", "pipeline.exchange", "memory.swap"])
    assert kept.shapes() == [(1, 1), (1, 2)]
    (one,) = kept.of_shape(1, 1)
    assert one.overrides == (
        "pipeline.slices=1",
        "pipeline.virtual_stages=1",
        "pipeline.exchange=off",
        "memory.recompute=none",
        "memory.swap=off",
    )


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


def test_the_command(path: Path, tmp_path: Path) -> None:
    written = tmp_path / "fastest.yaml"
    keep = ["--keep", "pipeline.virtual_stages", "--keep", "pipeline.exchange"]
    result = run(str(path), "--gpu-memory", "4", *keep, "--top", "2", "-o", str(written))
    assert result.exit_code == 0, result.output
    rows = [line for line in result.stdout.splitlines() if "none" in line and "The fastest" not in line]
    assert len(rows) == 2
    (fastest,) = (line for line in result.stdout.splitlines() if line.startswith("The fastest: "))
    overrides = fastest.removeprefix("The fastest: ").split()
    assert load_config(written) == load_config(path, overrides)
    assert rows[0].split()[0] == overrides[0].removeprefix("pipeline.slices=")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpu-memory", "0"], "--gpu-memory = 0.0: must be a number > 0, in GiB"),
        (["--keep", "optim.lr"], "--keep = optim.lr: must be one of pipeline.slices, "),
        (["pipeline.hardware=null"], "--hardware: needed for rates; give configs/hardware/h200.yaml"),
        (["pipeline.schedule=1f1b"], "pipeline.schedule = 1f1b: plan searches settings of slimpipe's alone"),
        (["--gpu-memory", "0.1"], "nothing fits: pipeline.slices="),
        (["--gpu-memory", "4", "-o", "{path}"], "exists; name another file, or remove it"),
        (["--gpu-memory", "4", "-o", "{path}/inside/fastest.yaml"], "is no folder that can be written to; make it"),
        (["parallel.pp=3"], "parallel.pp = 3: 4 layers cannot be cut into equal stages"),
        (
            ["model.layers=6", "pipeline.slices=2", "pipeline.virtual_stages=2"],
            "pipeline.virtual_stages = 2: 6 layers cannot be cut into 4 equal",
        ),
        (["train.global_batch=1026"], "train.global_batch = 1026: 1026 microbatches of 2 units or more a rank"),
        (["train.global_batch=1026"], "ask with 512, "),
        (["data.sequence_length=4099"], "data.sequence_length = 4099: cannot be cut into 2 equal slices or more"),
        (
            ["memory.swap=off", "memory.host_budget_gib=1", "--keep", "memory.swap"],
            "memory.host_budget_gib = 1.0: says",
        ),
    ],
)
def test_what_is_wrong_is_told_in_one_line(arguments: list[str], said: str, path: Path) -> None:
    given = [argument.replace("{path}", str(path)) for argument in arguments]
    memory = [] if "--gpu-memory" in given else ["--gpu-memory", "4"]
    result = run(str(path), *given, *memory, "--keep", "pipeline.virtual_stages")
    assert result.exit_code == 2
    assert said in result.stderr and len(result.stderr.strip().splitlines()) == 1


def test_budgets_are_those_of_settings_with_swap(path: Path) -> None:
    """They say nothing without: such settings are tried as ever. A device's budget leaves out what does not ask it."""
    kept = ["--keep", "pipeline.virtual_stages", "--keep", "memory.recompute"]
    plain = run(str(path), *kept, "--gpu-memory", "4")
    budget = run(str(path), *kept, "--gpu-memory", "4", "memory.host_budget_gib=1")
    assert plain.exit_code == budget.exit_code == 0, budget.stderr
    taken_back = " memory.host_budget_gib=null"
    assert taken_back in budget.stdout and "memory.swap=off" in plain.stdout
    assert plain.stdout == budget.stdout.replace(taken_back, "")
    least = run(str(path), *kept, "--gpu-memory", "0.6", "memory.host_budget_gib=0.0001")
    assert least.exit_code == 2 and "nothing fits" in least.stderr
    device = run(str(path), *kept, "--gpu-memory", "4", "memory.gpu_budget_gib=1")
    assert device.exit_code == 0 and "memory.swap=auto" in device.stdout


def test_keys_of_the_exchange_are_those_of_settings_with_exchange(path: Path, tmp_path: Path) -> None:
    """Without, they say nothing and are refused: such settings take them back, and what is printed can be run. A
    granule that does not divide a slice leaves out what lends, and no more."""
    kept = ["pipeline.virtual_stages", "memory.recompute", "memory.swap"]
    lending = ["pipeline.exchange=balanced", "pipeline.exchange_granule=1536", "pipeline.exchange_keep=kv"]
    lending.append("data.sequence_length=12288")

    def make(overrides: Sequence[str]) -> Config:
        return load_config(path, [*lending, *overrides])

    found = all_of(Search(make, load_hardware(HARDWARE), 4096 * MIB, kept))
    chosen = {(one.config.pipeline.slices, one.config.pipeline.exchange) for one in found}
    assert chosen == {(2, "balanced"), (3, "off"), (4, "balanced"), (6, "off"), (8, "balanced"), (12, "off")}
    for one in found:
        assert make(one.overrides) == one.config
        lends = one.config.pipeline.exchange == "balanced"
        assert one.config.pipeline.exchange_granule == (1536 if lends else None)
        assert one.config.pipeline.exchange_keep == ("kv" if lends else "none")
    settings = SETTINGS | {"pipeline": SETTINGS["pipeline"] | {"exchange": "balanced", "exchange_granule": 2048}}
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    written = tmp_path / "fastest.yaml"
    keep = [argument for key in ("pipeline.slices", *kept) for argument in ("--keep", key)]
    result = run(str(path), "pipeline.slices=1", *keep, "--gpu-memory", "4", "-o", str(written))
    assert result.exit_code == 0, result.stderr
    (fastest,) = (line for line in result.stdout.splitlines() if line.startswith("The fastest: "))
    assert fastest.endswith("pipeline.exchange_granule=null")
    assert load_config(written) == load_config(path, fastest.removeprefix("The fastest: ").split())


@pytest.mark.parametrize(
    ("unfit", "fit", "keep"),
    [
        ({"slices": 7}, "slices=2", ""),  # does not divide the sequence
        ({"slices": 7}, "slices=2", "virtual_stages"),
        ({"slices": 1, "virtual_stages": 2}, "slices=2", ""),  # as many as ranks are needed
        ({"slices": 1, "virtual_stages": 2}, "slices=4", "virtual_stages"),
        ({"virtual_stages": 3}, "virtual_stages=1", ""),  # six stages of four layers
        ({"slices": 2, "virtual_stages": "many"}, "virtual_stages=1", "slices"),
        ({"exchange_granule": 512}, "exchange=balanced", ""),
        ({"slices": 3, "exchange": "pairwise", "exchange_granule": 512}, "slices=4", "exchange"),
    ],
    ids=str,
)
def test_what_the_search_replaces_may_be_unfit(unfit: dict[str, Any], fit: str, keep: str, path: Path) -> None:
    """It finds what it finds with a value that fits."""
    settings = SETTINGS | {"pipeline": SETTINGS["pipeline"] | unfit}
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    with pytest.raises(ConfigError):
        load_config(path)
    arguments = ["--gpu-memory", "4", "--keep", "memory.swap", *(["--keep", f"pipeline.{keep}"] if keep else [])]
    asked, mended = run(str(path), *arguments), run(str(path), f"pipeline.{fit}", *arguments)
    assert asked.exit_code == mended.exit_code == 0, asked.stderr
    assert asked.stdout == mended.stdout and "The fastest: " in asked.stdout


@pytest.mark.parametrize(
    ("changes", "keep"),
    [
        (["pipeline.slices=7"], ["pipeline.slices"]),
        (["pipeline.virtual_stages=2", "pipeline.slices=1"], ["pipeline.slices", "pipeline.virtual_stages"]),
        (["pipeline.exchange_keep=kv"], ["pipeline.exchange"]),
        (["memory.recompute=all"], ["memory.recompute"]),
        (["pipeline.slices=7", "train.eval_every=2"], []),
        (["pipeline.slices=many", "optim.lr=0"], []),
        (["pipeline.slices=7", "pipeline.slice=2"], []),
        (["pipeline.virtual_stages=2", "parallel.pp=8"], []),
        (["pipeline.exchange=balanced", "pipeline.exchange_granule=3"], []),
        (["pipeline.slices=2", "pipeline.schedule=1f1b", "pipeline.exchange=balanced"], ["pipeline.exchange"]),
    ],
    ids=str,
)
def test_what_it_does_not_replace_is_refused_in_the_same_words(changes: list[str], keep: list[str], path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(path, changes)
    keep = [argument for key in keep for argument in ("--keep", key)]
    result = run(str(path), *changes, *keep, "--gpu-memory", "4")
    assert result.exit_code == 2 and result.stderr == f"{caught.value}\n"


def test_a_profiles_path_may_be_any(path: Path, tmp_path: Path) -> None:
    profile = tmp_path / "a: #b.yaml"
    profile.write_text(HARDWARE.read_text(encoding="utf-8"), encoding="utf-8")
    kept = ["--keep", "pipeline.virtual_stages", "--keep", "memory.recompute", "--keep", "pipeline.slices"]
    result = run(str(path), *kept, "--gpu-memory", "4", "--hardware", str(profile))
    assert result.exit_code == 0, result.stderr


def test_what_is_written_is_what_is_shown(path: Path) -> None:
    """One rank's microbatches of one slice: no loan pays, and none is asked for."""
    search = searched(path, 4096, keep=["pipeline.slices", "pipeline.virtual_stages", "memory.recompute"])
    (one,) = search.of_shape(1, 1)
    assert one.config.pipeline.exchange == "off" and "pipeline.exchange=off" in one.overrides


def test_a_machine_without_a_gpu_needs_to_be_told_one(path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    result = run(str(path))
    assert result.exit_code == 2 and "--gpu-memory: needed where there is no GPU" in result.stderr
