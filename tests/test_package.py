"""Packaging and scripts: it installs without a compiler or torch, and the scripts pass on what they should.

The builds run in a copy of the sources, the scripts in a copy with a stand-in for .venv's Python: nothing is downloaded
or trained here.
"""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"]


def run(command: list[str | Path], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=200
    )


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of what the package is built from, with a library of an earlier build in it."""
    copy = tmp_path / "sources"
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    for folder in ("slimpipe", "megatron_patches", "csrc"):
        if (ROOT / folder).exists():
            shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    for file in ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE"):
        shutil.copy(ROOT / file, copy)
    (copy / "slimpipe" / "_C.so").write_bytes(b"stale")
    return copy


def failing_compiler(folder: Path) -> Path:
    compiler = folder / "failing-c++"
    compiler.write_text("#!/bin/sh\necho 'merge_lse.cpp:1: error: no such luck' >&2\nexit 1\n")
    compiler.chmod(0o755)
    return compiler


@pytest.mark.parametrize("trouble", ["no compiler", "failing compiler", "no torch"])
def test_csrc_is_optional(sources: Path, tmp_path: Path, trouble: str) -> None:
    if trouble == "no compiler":
        environment, reason = {"CXX": "/nonexistent"}, "no C++ compiler: /nonexistent not found"
    elif trouble == "failing compiler":
        environment, reason = {"CXX": str(failing_compiler(tmp_path))}, "error: no such luck"
    else:
        hidden = tmp_path / "hidden"
        hidden.mkdir()
        (hidden / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
        environment, reason = {"PYTHONPATH": str(hidden)}, "No module named 'torch'"

    done = run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], sources, **environment)

    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("slimpipe: csrc not built")]
    assert len(lines) == 1 and reason in lines[0] and lines[0].endswith("the PyTorch fallbacks will be used")
    assert not (sources / "slimpipe" / "_C.so").exists()  # the stale one is no substitute


def test_the_cuda_part_comes_along_in_place(sources: Path, tmp_path: Path) -> None:
    """With stand-ins for a torch that has CUDA and for a compiler that succeeds."""
    torch, compiler = tmp_path / "stand-ins" / "torch", tmp_path / "c++"
    (torch / "utils").mkdir(parents=True)
    (torch / "__init__.py").write_text("class version: cuda = '13.0'")
    (torch / "utils" / "__init__.py").touch()
    (torch / "utils" / "cpp_extension.py").write_text("include_paths = library_paths = lambda: []")
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho built > "$2"\n')
    compiler.chmod(0o755)
    command: list[str | Path] = [sys.executable, "setup.py", "build_ext", "--inplace"]
    run(command, sources, CXX=str(compiler), PYTHONPATH=str(torch.parent)).check_returncode()
    for library in ("_C.so", "_C_cuda.so"):
        assert (sources / "slimpipe" / library).read_text() == "built\n", library


def test_wheel(sources: Path, tmp_path: Path) -> None:
    """Built by pip as an installation does it, with a compiler that fails."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    done = run([*pip, "-w", str(tmp_path), "."], sources, CXX=str(failing_compiler(tmp_path)))
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        info = next(name for name in names if name.endswith("/METADATA")).rpartition("/")[0]
        metadata = email.message_from_string(wheel.read(f"{info}/METADATA").decode())
        entry_points = wheel.read(f"{info}/entry_points.txt").decode()

    assert (metadata["Name"], metadata["Version"], metadata["Requires-Python"]) == ("slimpipe", "0.1.0", ">=3.10")
    requirements = metadata.get_all("Requires-Dist") or []
    assert {"torch>=2.11", "pydantic>=2.10", "tokenizers>=0.20", "filelock"} <= set(requirements)
    assert set(metadata.get_all("Provides-Extra") or []) == {"dev", "flash", "log", "parquet", "wandb"}
    assert "slimpipe = slimpipe.cli:app" in entry_points
    # Every module is in it: a folder without __init__.py would be left out silently.
    modules = {file.relative_to(sources).as_posix() for file in (sources / "slimpipe").rglob("*.py")}
    assert modules - set(names) == set()
    # The report page is made from these.
    assert {"slimpipe/report/style.css", "slimpipe/report/readout.js"} <= set(names)
    assert "slimpipe/py.typed" in names and not any(name.endswith(".so") for name in names)
    assert not any(name.startswith("tests") for name in names)


def test_licence() -> None:
    assert (ROOT / "LICENSE").read_text().split()[:4] == ["Apache", "License", "Version", "2.0,"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_sound(script: Path) -> None:
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n") and "\nset -euo pipefail\n" in text
    assert os.access(script, os.X_OK)
    assert run(["bash", "-n", script], ROOT).returncode == 0
    # Where packages come from is the machine's business.
    assert not re.search(r"https?://|index-url|/home/|/root/|/work/", text)


# Stands in for .venv/bin/python: notes how it is called, and fails where it is told to.
STAND_IN = """#!/usr/bin/env bash
echo "$*" >>"$CALLS"
case "$*" in
  *find_spec*) exit "${TORCH_MISSING:-0}" ;;
  "- 1 "* | "- 2 "*) cat >/dev/null; echo 2 ;;
  -) cat >/dev/null; echo fingerprint ;;
  *torch.distributed.run*) exit "${TRAINING:-0}" ;;
  *pytest*) exit "${TESTS:-0}" ;;
esac
"""


class Checkout:
    """A copy of the scripts with a stand-in for Python that notes its calls."""

    def __init__(self, root: Path, stamp: str | None) -> None:
        self.root = root
        self.calls_path = root / "calls"
        shutil.copytree(ROOT / "scripts", root / "scripts")
        python = root / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(STAND_IN)
        python.chmod(0o755)
        self.stamp = root / ".venv" / "slimpipe.stamp"
        if stamp is not None:
            self.stamp.write_text(stamp)

    def __call__(self, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        self.calls_path.write_text("")
        elsewhere = self.root / "elsewhere"
        elsewhere.mkdir(exist_ok=True)
        cleared = {"NNODES": "", "NPROC": "", "NODE_RANK": "", "MASTER_ADDR": "", "MASTER_PORT": ""}
        environment = {**cleared, "CALLS": str(self.calls_path), **environment}
        return run([self.root / "scripts" / script, *arguments], elsewhere, **environment)

    @property
    def calls(self) -> list[str]:
        return self.calls_path.read_text().splitlines()

    @property
    def installs(self) -> list[str]:
        return [call.split("--no-compile ")[1] for call in self.calls if "pip install" in call]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path, "fingerprint\ndev,log\n")


def test_set_up_installs_what_is_missing(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, stamp=None)
    assert checkout("setup_env.sh", TORCH_MISSING="1").returncode == 0
    assert checkout.installs == ["setuptools>=70.1 torch==2.13.0", "--no-build-isolation -e ."]
    # Done, and nothing changed.
    assert checkout("setup_env.sh").returncode == 0
    assert checkout.installs == []
    # More extras than were installed; torch is there.
    assert checkout("setup_env.sh", "dev,log").returncode == 0
    assert checkout.installs == [
        "setuptools>=70.1",
        "--no-build-isolation -e .[dev,log]",
        "--no-deps megatron-core==0.16.1",
    ]
    # Fewer are no reason to install.
    assert checkout("setup_env.sh", "log").returncode == checkout("setup_env.sh").returncode == 0
    assert checkout.installs == []
    # setup.py, csrc/ or torch changed.
    checkout.stamp.write_text("another\ndev,log\n")
    checkout("setup_env.sh", TORCH_MISSING="1", SLIMPIPE_TORCH="2.11.0")
    assert checkout.installs == ["setuptools>=70.1 torch==2.11.0", "--no-build-isolation -e ."]


def test_set_up_refuses_an_old_python(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, stamp=None)
    shutil.rmtree(tmp_path / ".venv")
    old = tmp_path / "old-python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = checkout("setup_env.sh", PYTHON=str(old))
    assert done.returncode == 1 and "Python 3.10 or newer" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_quickstart_never_writes_into_an_earlier_run(checkout: Checkout) -> None:
    for expected in ("runs/quickstart", "runs/quickstart-2", "runs/quickstart-3"):
        done = checkout("quickstart.sh", "train.steps=3")
        assert done.returncode == 0, done.stderr
        training, curve, completion = checkout.calls[-3:]
        assert "--nproc-per-node 2 -m slimpipe train configs/quickstart.yaml parallel.pp=2" in training
        assert training.endswith(f"train.steps=3 train.output={expected}")
        assert curve == f"-m slimpipe.train.curve {expected}"
        assert completion == f"-m slimpipe generate {expected} --prompt def "
        (checkout.root / expected).mkdir(parents=True)


def test_quickstart_stops_where_training_fails(checkout: Checkout) -> None:
    assert checkout("quickstart.sh", TRAINING="9").returncode == 9
    assert "torch.distributed.run" in checkout.calls[-1]


def test_tests_pass_on_arguments_and_status(checkout: Checkout) -> None:
    done = checkout("test.sh", "tests/data", "-k", "a or b", TESTS="5")
    assert done.returncode == 5
    assert checkout.calls[-1] == "-m pytest tests/data -k a or b"


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="tests of GPUs run one after the other")
def test_all_tests_run_beside_each_other(checkout: Checkout) -> None:
    assert checkout("test.sh").returncode == 0
    cores = min(4, len(os.sched_getaffinity(0)))
    assert checkout.calls[-1] == f"-m pytest --numprocesses {cores} --dist loadfile --no-loadscope-reorder"


def test_train_on_one_node(checkout: Checkout) -> None:
    done = checkout("train.sh", "a config.yaml", "train.steps=3", TRAINING="7")
    assert done.returncode == 7
    assert checkout.calls[-1].endswith(
        " -m torch.distributed.run --standalone --nproc-per-node 2 -m slimpipe train a config.yaml train.steps=3"
    )
    checkout("train.sh", "config.yaml", NPROC="5")
    assert "--nproc-per-node 5 " in checkout.calls[-1]
    usage = checkout("train.sh")
    assert usage.returncode == 2 and "scripts/train.sh CONFIG" in usage.stderr


def test_train_on_many_nodes(checkout: Checkout) -> None:
    done = checkout("train.sh", "config.yaml", NNODES="2")
    assert done.returncode != 0 and "MASTER_ADDR" in done.stderr
    where = {"NNODES": "2", "MASTER_ADDR": "head", "MASTER_PORT": "1234"}
    for rank, is_host in {"0": "true", "1": "false"}.items():
        assert checkout("train.sh", "config.yaml", NODE_RANK=rank, **where).returncode == 0
        assert "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint head:1234" in checkout.calls[-1]
        assert f"--rdzv-conf is_host={is_host} --nproc-per-node 2" in checkout.calls[-1]


@pytest.mark.parametrize(
    ("arguments", "nodes", "message"),
    [
        (["train.stepz=3"], "1", "train.stepz"),
        ([], "3", "asks for 2 processes, which 3 nodes cannot share evenly"),
    ],
)
def test_train_says_what_is_wrong_before_it_starts(
    checkout: Checkout, arguments: list[str], nodes: str, message: str
) -> None:
    """With the real Python, which reads the config."""
    python = checkout.root / ".venv" / "bin" / "python"
    python.unlink()
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    config = str(ROOT / "configs" / "quickstart.yaml")
    done = checkout("train.sh", config, *arguments, NNODES=nodes, MASTER_ADDR="localhost")
    assert done.returncode == 1
    assert message in done.stderr and "Traceback" not in done.stderr
