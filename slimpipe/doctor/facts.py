"""What can be seen of a machine, without judgement."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

PACKAGES: Final = (
    *("numpy", "pydantic", "pyyaml", "typer", "rich", "tokenizers", "filelock"),
    *("tensorboard", "wandb", "pyarrow", "triton", "transformers", "safetensors"),
    *("flash-attn", "flash-attn-3", "flash-attn-4", "megatron-core"),
)
"""Distributions whose versions are looked up."""


@dataclass(frozen=True)
class Device:
    """A GPU. `capability`: compute capability, (9, 0) for Hopper."""

    name: str
    memory: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Facts:
    """`torch` None: not installed. `cuda`: the CUDA that torch was built for, None for a build without. `driver`: the
    version of NVIDIA's driver, None where there is none. `usable`: whether torch can use a GPU. `visible`:
    CUDA_VISIBLE_DEVICES. `apart`: pairs of GPUs that cannot reach each other's memory. `extension`: whether csrc/ is
    built and loads; `extension_error`: why it does not load. Sizes in bytes."""

    python: tuple[int, int]
    system: str
    cores: int
    memory: int | None
    torch: str | None
    cuda: str | None = None
    driver: str | None = None
    usable: bool = False
    visible: str | None = None
    devices: tuple[Device, ...] = ()
    links: tuple[str, ...] = ()
    apart: tuple[tuple[int, int], ...] = ()
    nccl: str | None = None
    gloo: bool = False
    cudnn: str | None = None
    extension: bool = False
    extension_error: str | None = None
    compiler: str | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    attention: Mapping[str, str | None] = field(default_factory=dict)
    """By name of a backend: why it cannot run here, None where it can."""
    cache: str = ""
    cache_free: int | None = None


def look() -> Facts:
    """At this machine. Starts no process but `nvidia-smi`, uses no GPU memory worth naming, needs no network."""
    cache = Path("~/.cache/slimpipe").expanduser()
    free = next((shutil.disk_usage(place).free for place in (cache, *cache.parents) if place.exists()), None)
    plain = Facts(
        python=(sys.version_info.major, sys.version_info.minor),
        system=f"{platform.system()} {platform.release()}, {platform.machine()}",
        cores=_cores(),
        memory=_memory(),
        torch=_version("torch"),
        driver=_driver(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        compiler=shutil.which(os.environ.get("CXX", "c++").split()[0]) or shutil.which("g++"),
        packages={name: found for name in PACKAGES if (found := _version(name)) is not None},
        cache=str(cache),
        cache_free=free,
    )
    return plain if plain.torch is None else _with_torch(plain)


def _with_torch(facts: Facts) -> Facts:
    import torch
    import torch.distributed as dist

    from slimpipe.kernels.merge import extension_available

    usable = torch.cuda.is_available()
    devices: list[Device] = []
    apart: list[tuple[int, int]] = []
    if usable:
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            devices.append(Device(found.name, found.total_memory, (found.major, found.minor)))
        pairs = ((a, b) for a in range(len(devices)) for b in range(a + 1, len(devices)))
        apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        extension = extension_available()
    nccl = torch.cuda.nccl.version() if usable and dist.is_nccl_available() else None
    cudnn = torch.backends.cudnn.version() if usable else None
    return replace(
        facts,
        torch=torch.__version__,
        cuda=torch.version.cuda,
        usable=usable,
        devices=tuple(devices),
        links=_links(len(devices)),
        apart=tuple(apart),
        nccl=".".join(map(str, nccl)) if nccl is not None else None,
        gloo=dist.is_available() and dist.is_gloo_available(),
        cudnn=None if cudnn is None else f"{cudnn // 10000}.{cudnn % 10000 // 100}.{cudnn % 100}",
        extension=extension,
        extension_error=str(said[-1].message).splitlines()[0] if said and not extension else None,
        attention=_attention(torch.device("cuda", 0) if usable else torch.device("cpu")),
    )


def _attention(device: object) -> dict[str, str | None]:
    """Every backend, made for bf16 on a GPU and for fp32 on the CPU."""
    import torch

    from slimpipe.kernels.attention import select_backend
    from slimpipe.kernels.attention.flash_package import PACKAGES as packaged

    assert isinstance(device, torch.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found: dict[str, str | None] = {}
    for name in ("plain", "cudnn", "flash", *packaged):
        try:
            select_backend(name, device, dtype, deterministic=False)
            found[name] = None
        except Exception as error:  # a package that is there and broken may raise anything when it is imported
            found[name] = str(error).splitlines()[0].removeprefix(f"train.attention = {name}: ")
    return found


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _driver() -> str | None:
    found = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found.splitlines()[0].strip() if found else None


def _links(devices: int) -> tuple[str, ...]:
    """A line for each pair of GPUs, `GPU 0 - GPU 1: NV18`, by `nvidia-smi topo -m`."""
    if devices < 2:
        return ()
    rows = [line.split("\t") for line in (_run("nvidia-smi", "topo", "-m") or "").splitlines()]
    cells = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows if row[0].strip().startswith("GPU")}
    return tuple(
        f"GPU {a} - GPU {b}: {cells[f'GPU{a}'][b]}"
        for a in range(devices)
        for b in range(a + 1, devices)
        if f"GPU{a}" in cells and b < len(cells[f"GPU{a}"])
    )


def _run(*command: str) -> str | None:
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout if found.returncode == 0 else None
