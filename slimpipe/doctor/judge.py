"""From facts to findings: is it there, and if not why, and what brings it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from slimpipe.doctor.facts import Facts
from slimpipe.plan.peaks import peak_tflops

State = Literal["ok", "missing", "broken"]
"""`broken`: slimpipe does not run without it. `missing`: it does, with less."""

_LEAST_PYTHON: Final = (3, 10)
_LEAST_TORCH: Final = (2, 11)
_GIB: Final = 2**30
_LOW_DISK: Final = 10 * _GIB
_NEEDED: Final = ("numpy", "pydantic", "pyyaml", "typer", "rich", "tokenizers", "filelock")
# Distribution: (what it is for, what brings it).
_ON_REQUEST: Final = {
    "tensorboard": ("log.tensorboard", "pip install 'slimpipe[log]'"),
    "wandb": ("log.wandb", "pip install 'slimpipe[wandb]'"),
    "pyarrow": ("Parquet corpora", "pip install 'slimpipe[parquet]'"),
    "megatron-core": ("comparisons of token files, in the tests", "pip install megatron-core"),
}
_BACKENDS: Final = {
    "cudnn": "the default on Hopper and newer GPUs",
    "flash": "torch's own FlashAttention-2; deterministic where asked",
    "flash2": "the flash-attn package, version 2",
    "flash3": "the flash-attn package, version 3",
    "flash4": "the flash-attn package, version 4: the fastest on long pasts",
}


class Finding(NamedTuple):
    """One row. `value`: what is there. `why`, `command`: of what is not."""

    group: str
    name: str
    state: State
    value: str
    why: str = ""
    command: str = ""


def examine(facts: Facts) -> list[Finding]:
    """Every finding, group by group."""
    return [*_base(facts), *_devices(facts), *_links(facts), *_attention(facts), *_compiled(facts), *_packages(facts)]


def _base(facts: Facts) -> Iterator[Finding]:
    python = ".".join(map(str, facts.python))
    if facts.python >= _LEAST_PYTHON:
        yield Finding("system", "Python", "ok", python)
    else:
        why = f"slimpipe needs {'.'.join(map(str, _LEAST_PYTHON))} or newer"
        yield Finding("system", "Python", "broken", python, why, "PYTHON=python3.11 scripts/setup_env.sh")
    memory = "" if facts.memory is None else f", {facts.memory / _GIB:.0f} GiB of memory"
    yield Finding("system", "machine", "ok", f"{facts.system}; {facts.cores} cores{memory}")
    if facts.cache_free is not None:
        value = f"{facts.cache_free / _GIB:.0f} GiB free under {facts.cache}"
        if facts.cache_free >= _LOW_DISK:
            yield Finding("system", "disk", "ok", value)
        else:
            why, command = "token files may not fit", "set data.cache_dir to a folder on a larger disk"
            yield Finding("system", "disk", "missing", value, why, command)
    yield _torch(facts)


def _torch(facts: Facts) -> Finding:
    if facts.torch is None:
        return Finding("system", "torch", "broken", "", "not installed", "scripts/setup_env.sh")
    numbers = tuple(int(part) for part in facts.torch.split("+")[0].split(".")[:2] if part.isdecimal())
    build = f"for CUDA {facts.cuda}" if facts.cuda else "built without CUDA"
    value = f"{facts.torch}, {build}"
    if numbers < _LEAST_TORCH:
        least = ".".join(map(str, _LEAST_TORCH))
        return Finding("system", "torch", "broken", value, f"older than {least}", f"pip install 'torch>={least}'")
    return Finding("system", "torch", "ok", value)


def _devices(facts: Facts) -> Iterator[Finding]:
    for index, device in enumerate(facts.devices):
        major, minor = device.capability
        value = f"{device.name}, {device.memory / _GIB:.1f} GiB, compute capability {major}.{minor}"
        yield Finding("devices", f"GPU {index}", "ok", f"{value}, driver {facts.driver or 'unknown'}")
        if major < 8:
            why = "no bfloat16 in hardware: train.dtype float32 only"
            yield Finding("devices", f"GPU {index} bfloat16", "missing", "", why, "use an Ampere GPU or newer")
    names = {device.name for device in facts.devices}
    for name in sorted(names):
        if peak_tflops(name, "bfloat16") is None:
            why = f"the peak of {name} is not known here, so MFU is not shown"
            yield Finding("devices", "peak for MFU", "missing", "", why, "set log.peak_tflops")
    if not facts.devices:
        yield _no_gpu(facts)


def _no_gpu(facts: Facts) -> Finding:
    if facts.driver is None:
        why, command = "no NVIDIA driver answers (nvidia-smi): training runs on the CPU", "install the GPU's driver"
    elif facts.torch is not None and facts.cuda is None:
        why = f"driver {facts.driver} is there, but torch was built without CUDA"
        command = "pip install --force-reinstall torch (a build with CUDA)"
    elif facts.visible is not None and not facts.visible.strip("-1 "):
        why = f"CUDA_VISIBLE_DEVICES = {facts.visible!r} hides every GPU"
        command = "unset CUDA_VISIBLE_DEVICES"
    else:
        why = f"driver {facts.driver} does not serve torch's CUDA {facts.cuda}"
        command = "update the driver, or install a torch for an older CUDA"
    return Finding("devices", "GPU", "missing", "", why, command)


def _links(facts: Facts) -> Iterator[Finding]:
    if facts.gloo:
        yield Finding("links", "gloo", "ok", "between processes on the CPU")
    else:
        yield Finding("links", "gloo", "broken", "", "this torch has no gloo", "pip install --force-reinstall torch")
    if facts.nccl is not None:
        yield Finding("links", "NCCL", "ok", facts.nccl)
    else:
        why = "comes with a CUDA build of torch" if facts.cuda is None else "no GPU to use it"
        yield Finding("links", "NCCL", "missing", "", why, "see devices above")
    for link in facts.links:
        pair, kind = link.rsplit(": ", 1)
        if kind.startswith("NV"):
            yield Finding("links", pair, "ok", f"NVLink ({kind})")
        else:
            yield Finding("links", pair, "missing", kind, "no NVLink between them: transfers take longer", "")
    for a, b in facts.apart:
        why = "neither reaches the other's memory: transfers go through the host"
        command = "look at `nvidia-smi topo -p2p r` and the IOMMU's settings"
        yield Finding("links", f"GPU {a} - GPU {b} peer access", "missing", "", why, command)


def _attention(facts: Facts) -> Iterator[Finding]:
    if "plain" in facts.attention:
        yield Finding("attention", "plain", "ok", "PyTorch, everywhere; slow on a GPU")
    for name, purpose in _BACKENDS.items():
        if name not in facts.attention:
            continue
        reason = facts.attention[name]
        if reason is None:
            version = f"cuDNN {facts.cudnn}; " if name == "cudnn" and facts.cudnn else ""
            yield Finding("attention", name, "ok", f"{version}{purpose}")
            continue
        why, _, command = reason.rpartition("; ")
        if not facts.usable:
            why, command = "runs on a GPU", "see devices above"
        yield Finding("attention", name, "missing", "", f"{why or reason} ({purpose})", command)


def _compiled(facts: Facts) -> Iterator[Finding]:
    build = "pip install --no-build-isolation -e ."
    if facts.extension:
        yield Finding("compiled", "csrc", "ok", "slimpipe/_C.so: C++ operators for the CPU")
    elif facts.compiler is None:
        why = "not built, and no C++ compiler is found; the PyTorch fallbacks run"
        yield Finding("compiled", "csrc", "missing", "", why, f"apt-get install g++, then {build}")
    else:
        why = facts.extension_error or "not built; the PyTorch fallbacks run"
        yield Finding("compiled", "csrc", "missing", "", why, build)
    triton = facts.packages.get("triton")
    if triton is not None:
        yield Finding("compiled", "triton", "ok", f"{triton}: elementwise chains as one kernel on a GPU")
    else:
        why = "elementwise chains run operator by operator on a GPU" if facts.usable else "only a GPU needs it"
        yield Finding("compiled", "triton", "missing", "", why, "pip install triton" if facts.usable else "")


def _packages(facts: Facts) -> Iterator[Finding]:
    for name in _NEEDED:
        if (version := facts.packages.get(name)) is not None:
            yield Finding("packages", name, "ok", version)
        else:
            yield Finding("packages", name, "broken", "", "not installed", "scripts/setup_env.sh")
    for name, (purpose, command) in _ON_REQUEST.items():
        if (version := facts.packages.get(name)) is not None:
            yield Finding("packages", name, "ok", f"{version}: {purpose}")
        else:
            yield Finding("packages", name, "missing", "", f"not installed; for {purpose}", command)
