"""`slimpipe doctor`: what it says of machines of every kind, and of this one."""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from slimpipe.cli import app
from slimpipe.doctor import Device, Facts, Finding, examine, facts, look

H200 = Device("NVIDIA H200", 143_771 * 2**20, (9, 0))
NEEDED = ("numpy", "pydantic", "pyyaml", "typer", "rich", "tokenizers", "filelock")
WHOLE = Facts(
    python=(3, 11),
    system="Linux 6.1, x86_64",
    cores=32,
    memory=256 * 2**30,
    torch="2.11.0+cu130",
    cuda="13.0",
    driver="580.1",
    usable=True,
    devices=(H200, H200),
    links=("GPU 0 - GPU 1: NV18",),
    nccl="2.28.9",
    gloo=True,
    cudnn="9.19.0",
    extension=True,
    compiler="/usr/bin/c++",
    packages=dict.fromkeys((*NEEDED, "triton", "tensorboard", "wandb", "pyarrow", "megatron-core"), "1.0"),
    attention=dict.fromkeys(("plain", "cudnn", "flash", "flash2", "flash3", "flash4")),
    cache="/data/cache/slimpipe",
    cache_free=500 * 2**30,
)
NO_GPU: dict[str, Any] = {"usable": False, "devices": (), "links": (), "nccl": None, "cudnn": None}


def missing(**changes: Any) -> dict[str, Finding]:
    """By name, what is not there of a machine that has everything, but for `changes`."""
    return {finding.name: finding for finding in examine(replace(WHOLE, **changes)) if finding.state != "ok"}


def test_a_machine_with_everything_has_nothing_missing() -> None:
    assert missing() == {}
    rows = {finding.name: finding.value for finding in examine(WHOLE)}
    assert rows["GPU 1"] == "NVIDIA H200, 140.4 GiB, compute capability 9.0, driver 580.1"
    assert rows["GPU 0 - GPU 1"] == "NVLink (NV18)" and rows["NCCL"] == "2.28.9"
    assert rows["torch"] == "2.11.0+cu130, for CUDA 13.0" and rows["cudnn"].startswith("cuDNN 9.19.0; ")


def without(*names: str) -> dict[str, str]:
    return {name: version for name, version in WHOLE.packages.items() if name not in names}


@pytest.mark.parametrize(
    ("changes", "name", "state", "why", "command"),
    [
        ({"python": (3, 9)}, "Python", "broken", "slimpipe needs 3.10 or newer",
         "PYTHON=python3.11 scripts/setup_env.sh"),
        ({"torch": "2.10.1+cu128"}, "torch", "broken", "older than 2.11", "pip install 'torch>=2.11'"),
        ({"torch": None, "attention": {}}, "torch", "broken", "not installed", "scripts/setup_env.sh"),
        (NO_GPU | {"driver": None}, "GPU", "missing", "no NVIDIA driver answers", "install the GPU's driver"),
        (NO_GPU | {"cuda": None}, "GPU", "missing", "driver 580.1 is there, but torch was built without CUDA",
         "pip install --force-reinstall torch (a build with CUDA)"),
        (NO_GPU | {"visible": ""}, "GPU", "missing", "CUDA_VISIBLE_DEVICES = '' hides every GPU",
         "unset CUDA_VISIBLE_DEVICES"),
        (NO_GPU | {"visible": "0"}, "GPU", "missing", "driver 580.1 does not serve torch's CUDA 13.0",
         "update the driver"),
        ({"devices": (Device("Tesla V100", 2**34, (7, 0)),)}, "GPU 0 bfloat16", "missing", "no bfloat16 in hardware",
         "use an Ampere GPU or newer"),
        ({"devices": (replace(H200, name="NVIDIA Z1"),)}, "peak for MFU", "missing",
         "the peak of NVIDIA Z1 is not known",
         "set log.peak_tflops"),
        ({"links": ("GPU 0 - GPU 1: SYS",)}, "GPU 0 - GPU 1", "missing", "no NVLink between them", ""),
        ({"apart": ((0, 1),)}, "GPU 0 - GPU 1 peer access", "missing", "neither reaches the other's memory",
         "look at `nvidia-smi topo -p2p r`"),
        (NO_GPU, "NCCL", "missing", "no GPU to use it", "see devices above"),
        (NO_GPU | {"cuda": None}, "NCCL", "missing", "comes with a CUDA build of torch", "see devices above"),
        ({"gloo": False}, "gloo", "broken", "this torch has no gloo", "pip install --force-reinstall torch"),
        ({"attention": {"flash4": "flash_attn.cute.interface is not installed; pip install 'slimpipe[flash]'"}},
         "flash4", "missing", "flash_attn.cute.interface is not installed (the flash-attn package, version 4",
         "pip install 'slimpipe[flash]'"),
        (NO_GPU | {"attention": {"cudnn": "needs a GPU and bfloat16; use plain"}}, "cudnn", "missing",
         "runs on a GPU", "see devices above"),
        ({"extension": False}, "csrc", "missing", "not built; the PyTorch fallbacks run",
         "pip install --no-build-isolation -e ."),
        ({"extension": False, "compiler": None}, "csrc", "missing", "no C++ compiler is found",
         "apt-get install g++, then"),
        ({"extension": False, "extension_error": "undefined symbol"}, "csrc", "missing", "undefined symbol",
         "pip install --no-build-isolation -e ."),
        ({"packages": without("triton")}, "triton", "missing", "operator by operator on a GPU", "pip install triton"),
        ({"packages": without("wandb")}, "wandb", "missing", "not installed; for log.wandb",
         "pip install 'slimpipe[wandb]'"),
        ({"packages": without("tensorboard")}, "tensorboard", "missing", "for log.tensorboard",
         "pip install 'slimpipe[log]'"),
        ({"packages": without("numpy")}, "numpy", "broken", "not installed", "scripts/setup_env.sh"),
        ({"cache_free": 2**30}, "disk", "missing", "token files may not fit", "set data.cache_dir"),
    ],
)  # fmt: skip
def test_what_is_missing_says_why_and_what_brings_it(
    changes: dict[str, Any], name: str, state: str, why: str, command: str
) -> None:
    found = missing(**changes)[name]
    assert found.state == state and why in found.why and found.command.startswith(command)
    assert command or not found.command


def test_every_extra_that_is_named_exists() -> None:
    extras = set(importlib.metadata.metadata("slimpipe").get_all("Provides-Extra") or [])
    if not extras:
        pytest.skip("slimpipe is not installed here, only run from its folder")
    commands = [finding.command for finding in examine(replace(WHOLE, packages={}))]
    named = {command.split("[")[1].split("]")[0] for command in commands if "slimpipe[" in command}
    assert named == {"log", "wandb", "parquet"}


def test_links_are_read_from_the_drivers_table(monkeypatch: pytest.MonkeyPatch) -> None:
    table = (
        "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
        "GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0\n"
        "GPU1\tNV18\t X \tNODE\tSYS\t0-47\t0\n"
        "GPU2\tSYS\tNODE\t X \tSYS\t48-95\t1\n"
        "NIC0\tPIX\tSYS\tSYS\t X \n\nLegend:\n\n  X    = Self\n"
    )
    monkeypatch.setattr(facts, "_run", lambda *command: table)
    assert facts._links(3) == ("GPU 0 - GPU 1: NV18", "GPU 0 - GPU 2: SYS", "GPU 1 - GPU 2: NODE")
    monkeypatch.setattr(facts, "_run", lambda *command: None)
    assert facts._links(3) == () and facts._links(1) == ()


def test_of_this_machine_it_says_what_is_so() -> None:
    found = look()
    assert found.torch == torch.__version__ and found.usable == torch.cuda.is_available()
    assert len(found.devices) == (torch.cuda.device_count() if found.usable else 0)
    assert found.packages["numpy"] == importlib.metadata.version("numpy")
    assert found.attention["plain"] is None and found.gloo


def test_the_command_prints_a_table_and_json() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    rows = json.loads(result.stdout)
    assert {row["group"] for row in rows} == {"system", "devices", "links", "attention", "compiled", "packages"}
    assert all(row.keys() == {"group", "name", "state", "value", "why", "command"} for row in rows)
    assert result.exit_code == int(any(row["state"] == "broken" for row in rows))
    table = CliRunner().invoke(app, ["doctor"]).stdout
    for row in rows:
        assert row["name"] in table and row["command"].split("\n")[0] in table


def test_what_it_cannot_run_without_sets_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    for changes, code in (({}, 0), ({"packages": without("wandb")}, 0), ({"torch": "2.9.0"}, 1)):
        monkeypatch.setattr("slimpipe.doctor.command.look", lambda changes=changes: replace(WHOLE, **changes))
        assert CliRunner().invoke(app, ["doctor"]).exit_code == code
