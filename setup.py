"""Packaging of slimpipe. Tool settings are in pyproject.toml.

    pip install --no-build-isolation -e .

`csrc/` is compiled against the torch of the environment, hence no build isolation. The extension is optional: with no
torch at build time, no C++ compiler, or a failing compile, installation prints one line and goes on, and slimpipe runs
on its PyTorch fallbacks.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


class BuildCsrc(build_ext):
    """Compiles csrc/ into slimpipe/_C.so, a library of torch operators (not a Python module), or says why not."""

    def get_ext_filename(self, fullname: str) -> str:
        # Without the Python tag in its name: nothing in the library depends on the Python version.
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        # A library left by an earlier build must not pass for this one's.
        for stale in {target, ROOT / self.get_ext_filename(ext.name)}:
            stale.unlink(missing_ok=True)
            stale.with_name("_C_cuda.so").unlink(missing_ok=True)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            compile_operators([str(ROOT / source) for source in ext.sources], target)
            compile_cuda_part(target.with_name("_C_cuda.so"))
        except Exception as error:
            reason = " ".join(str(error).split())
            print(f"slimpipe: csrc not built ({reason[:600]}); the PyTorch fallbacks will be used", flush=True)

    def copy_extensions_to_source(self) -> None:
        """In place, and so in an editable install: the CUDA part is no extension of its own, and comes along."""
        super().copy_extensions_to_source()
        for ext in self.extensions:
            built = Path(self.build_lib, self.get_ext_filename(ext.name)).with_name("_C_cuda.so")
            if built.exists():
                shutil.copy2(built, ROOT / "slimpipe" / "_C_cuda.so")


def compile_cuda_part(target: Path) -> None:
    """Compiles csrc/cuda where torch has CUDA (it needs neither nvcc nor CUDA's headers); prints why if it fails."""
    import torch

    if torch.version.cuda is None:
        return
    try:
        compile_operators(sorted(str(path) for path in (ROOT / "csrc" / "cuda").glob("*.cpp")), target, ["-lc10_cuda"])
    except Exception as error:
        reason = " ".join(str(error).split())
        print(
            f"slimpipe: csrc/cuda not built ({reason[:600]}); swapping does without its allocator callback", flush=True
        )


def compile_operators(sources: list[str], target: Path, libraries: Sequence[str] = ()) -> None:
    """Compiles C++ operators against the installed torch in one command. Raises if anything is missing or fails."""
    # Imported here, not above: pip runs this file several times, and only one of those builds.
    from torch.utils.cpp_extension import include_paths, library_paths

    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("c++") or shutil.which("g++") or "clang++"]
    if shutil.which(compiler[0]) is None:
        raise FileNotFoundError(f"no C++ compiler: {compiler[0]} not found")
    command = [*compiler, "-std=c++20", "-O3", "-DNDEBUG", "-fPIC", "-shared", "-fopenmp", "-Wall"]
    command += [*(f"-I{path}" for path in include_paths()), *sources]
    command += [f"-L{path}" for path in library_paths()]
    command += ["-lc10", "-ltorch_cpu", "-ltorch", *libraries, "-o", str(target)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        errors = [line for line in result.stderr.splitlines() if "error" in line] or result.stderr.splitlines()
        raise RuntimeError(f"{compiler[0]} failed: {errors[0] if errors else result.returncode}")


setup(
    name="slimpipe",
    version="0.1.0",
    description="Pipeline-parallel LLM training by slices of the sequence, for long contexts",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["slimpipe*"]),
    package_data={"slimpipe": ["py.typed"], "slimpipe.report": ["*.css", "*.js"]},
    install_requires=[
        "torch>=2.11",
        "numpy",
        "pydantic>=2.10",
        "pyyaml",
        "typer",
        "rich",
        "tokenizers>=0.20",
        "filelock",
    ],
    extras_require={
        "dev": [
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "mypy",
            "types-PyYAML",
            "pyarrow",
            "scipy",
            "safetensors",
            "triton>=3.6; platform_system == 'Linux'",
        ],
        "flash": ["flash-attn-4>=4.0.0b36"],
        "log": ["tensorboard"],
        "parquet": ["pyarrow"],
        "wandb": ["wandb"],
    },
    entry_points={"console_scripts": ["slimpipe = slimpipe.cli:app"]},
    ext_modules=[
        Extension(
            "slimpipe._C", sources=["csrc/merge_lse.cpp", "csrc/operators.cpp", "csrc/pending.cpp"], optional=True
        )
    ],
    cmdclass={"build_ext": BuildCsrc},
)
