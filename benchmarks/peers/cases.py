"""What is run, the most telling first: GPU minutes are scarce. Several settings a system; the best one counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.jobs import Case
from benchmarks.peers.systems import config_of
from benchmarks.pipeline_cases import PROFILE
from slimpipe.plan.flops import step_flops

KIB = 1024
LINK_PROFILE = "build/slow_link.yaml"
"""The hardware profile with the slow link as measured: written by the run, read by slimpipe's cases there."""
PAYING = {"exchange": "balanced", "hardware": f"configs/hardware/{PROFILE.name}"}
"""Only loans that pay at NCCL's rates."""
SHARED = {**PAYING, "carrier": "symmetric", "collectives": "symmetric"}
"""The same, and what ranks exchange through memory that both reach."""
LONGEST = (16, 32, 64, 128, 256, 512)

Settings = dict[str, list[dict[str, Any]]]
"""By system, the most promising first; of torch's ring, which nobody had promised to compile, a plain one."""

AT_64K: Settings = {
    "slimpipe": [
        {"n": 16, "recompute": "norms", **PAYING},
        {"n": 16, "recompute": "norms"},
        {"n": 4, "v": 4, "recompute": "none", **SHARED},
        {"n": 8, "v": 2, "recompute": "none", **SHARED},
        {"n": 8, "recompute": "norms", **PAYING},
    ],
    "FSDP2 + CP": [
        {"recompute": "mlp"},
        {"recompute": "mlp", "compiled": True},
        {"recompute": "none", "compiled": True},
        {"recompute": "none", "compiled": True, "accumulate": True, "reshard": False},
        {"recompute": "mlp", "rotate": "alltoall"},
    ],
    "megatron interleaved": [
        {"v": 2, "recompute": "full"},
        {"v": 2, "recompute": "selective:mlp"},
        {"v": 2, "recompute": "block:2"},
    ],
    "megatron 1F1B": [
        {"recompute": "full"},
        {"recompute": "selective:mlp"},
        {"recompute": "block:6"},
        {"recompute": "none", "offload": "attn_norm,qkv_linear,core_attn,attn_proj,mlp_norm"},
    ],
    "torch 1F1B": [
        {"recompute": "all_but_attention", "compiled": True},
        {"recompute": "mlp", "compiled": True},
        {"recompute": "full"},
    ],
    "torch interleaved": [{"v": 2, "recompute": "all_but_attention", "compiled": True}, {"v": 2, "recompute": "full"}],
}
AT_128K: Settings = {
    "slimpipe": [
        {"n": 8, "v": 2, "recompute": "norms", "swap": "auto", **SHARED},
        # What `slimpipe plan` says.
        {"n": 8, "v": 4, "recompute": "norms", "swap": "auto", **SHARED},
        {"n": 8, "v": 2, "recompute": "mlp", **SHARED},
        {"n": 16, "recompute": "mlp", **PAYING},
    ],
    "FSDP2 + CP": [
        {"recompute": "mlp"},
        {"recompute": "mlp", "compiled": True},
        {"recompute": "all_but_attention", "compiled": True},
        {"recompute": "full"},
    ],
    "megatron interleaved": [{"v": 2, "recompute": "full"}],
    "megatron 1F1B": [{"recompute": "full"}],
    "torch 1F1B": [{"recompute": "all_but_attention", "compiled": True}, {"recompute": "full"}],
    "torch interleaved": [{"v": 2, "recompute": "all_but_attention", "compiled": True}],
}
AT_16K: Settings = {
    "slimpipe": [
        {"n": 2, "v": 4, "recompute": "none", **SHARED},
        {"n": 4, "v": 2, "recompute": "none", **SHARED},
        {"n": 4, "recompute": "none"},
    ],
    "megatron interleaved": [{"v": 2, "recompute": "none"}, {"v": 4, "recompute": "none"}],
    "FSDP2 + CP": [{}, {"compiled": True}, {"accumulate": True, "reshard": False, "compiled": True}],
    "torch interleaved": [{"v": 2, "compiled": True}],
    "megatron 1F1B": [{"recompute": "none"}],
    "torch 1F1B": [{"compiled": True}],
}
BIG_64K: Settings = {
    # What `slimpipe plan` says with nothing in host memory, and with what a host of 256 GiB can hold.
    "slimpipe": [
        {"n": 4, "v": 4, "recompute": "mlp", **SHARED},
        {"n": 8, "v": 4, "recompute": "norms", "swap": "auto", **SHARED},
    ],
    "FSDP2 + CP": [
        {"recompute": "all_but_attention"},
        {"recompute": "full"},
        {"recompute": "all_but_attention", "compiled": True},
        {"recompute": "mlp", "compiled": True},
    ],
    "megatron interleaved": [{"v": 2, "recompute": "full"}],
    "megatron 1F1B": [{"recompute": "full"}],
    "torch 1F1B": [{"recompute": "all_but_attention", "compiled": True}],
}
BIG_128K: Settings = {
    "slimpipe": [{"n": 16, "recompute": "all_but_attention", **PAYING}],
    "FSDP2 + CP": [{"recompute": "full"}, {"recompute": "all_but_attention", "compiled": True}],
    "megatron 1F1B": [{"recompute": "full"}],
}
# Pipelines send hidden states; gathering weights once a step is what sharding can do for a slow link.
SLOW_64K: Settings = {
    "link": [{}],
    "slimpipe": [
        {"n": 16, "recompute": "norms"},
        {"n": 16, "recompute": "norms", "exchange": "balanced", "hardware": LINK_PROFILE},
        {"n": 16, "recompute": "norms", "vocab": False},
    ],
    "FSDP2 + CP": [{"recompute": "mlp", "accumulate": True, "reshard": False}],
    "megatron interleaved": [{"v": 2, "recompute": "full"}],
    "megatron 1F1B": [{"recompute": "full"}],
}
# What takes the least memory in each system.
LEAN: Settings = {
    "slimpipe": [{"recompute": "full"}],  # and slices of 8K tokens
    "megatron 1F1B": [{"recompute": "full"}],
    "FSDP2 + CP": [{"recompute": "full"}],
    "torch 1F1B": [{"recompute": "full"}],
    "megatron interleaved": [{"v": 2, "recompute": "full"}],
}
PARTS = ("64k", "slow", "128k", "16k", "longest", "8b-64k", "8b-128k")


def cases(part: str, first: bool = False) -> Iterator[tuple[str, Case]]:
    """A part's cases by name, in the order in which they should run; `first`: one a system."""
    table = {
        "64k": (AT_64K, 16, 64, 2, 3),
        "slow": (SLOW_64K, 16, 64, 2, 2),
        "128k": (AT_128K, 16, 128, 2, 2),
        "16k": (AT_16K, 16, 16, 4, 5),
        "8b-64k": (BIG_64K, 32, 64, 2, 2),
        "8b-128k": (BIG_128K, 32, 128, 2, 2),
    }
    if part == "longest":
        for system, (setting,) in LEAN.items():
            for kib in LONGEST:
                # m = 2 is the least that fills a pipeline of two ranks.
                name, case = make(system, setting, 16, kib, 2, 1)
                yield name, case | ({"n": max(8, kib // 8)} if system == "slimpipe" else {})
        return
    settings, layers, kib, m, steps = table[part]
    link = "slow" if part == "slow" else "fast"
    # Every system's first setting before any system's second; then a system's others together, in one job.
    for system, each in settings.items():
        yield make(system, each[0], layers, kib, m, steps, link)
    for system, each in settings.items():
        for setting in [] if first else each[1:]:
            yield make(system, setting, layers, kib, m, steps, link)


def make(
    system: str, setting: dict[str, Any], layers: int, kib: int, m: int, steps: int, link: str = "fast"
) -> tuple[str, Case]:
    """(name, case). One step alone is a try for memory: its time, with caches cold, counts for nothing."""
    shown = {key: value for key, value in setting.items() if key != "hardware"}
    words = " ".join(f"{key}={value}" for key, value in shown.items())
    name = f"{layers}l-{kib}k{'-slow' * (link == 'slow')}{'-once' * (steps == 1)} {system} {words}".rstrip()
    plain = {"n": 1, "v": 1, "vocab": True, "recompute": "none", "carrier": "nccl"}
    ours: dict[str, Any] = plain if system == "slimpipe" else {}
    shape = {"ranks": 2, "layers": layers, "length": kib * KIB, "m": m, "steps": steps}
    return name, {"system": system, "link": link, "setting": words, **shape, **ours, **setting}


def expected_seconds(case: Case) -> float:
    """A guess, to plan runs by: 40 % MFU, less with recomputation, start of the job and of the system."""
    if case["system"] == "link":
        return 30.0
    model = config_of(case | {"hardware": None, "exchange": "off"}).model
    rate = 989e12 * case["ranks"] * (0.3 if "full" in str(case.get("recompute")) else 0.4)
    if case["link"] == "slow" and case["system"] == "FSDP2 + CP":
        rate /= 5  # 7.4 % in a trial
    start = 45 if case.get("compiled") else 30
    return start + case["steps"] * step_flops(model, case["length"], case["m"]) / rate
