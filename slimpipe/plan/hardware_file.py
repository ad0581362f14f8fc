"""Hardware profiles as small YAML files. `slimpipe calibrate` writes one.

    name: H200
    ranks_per_node: 8
    inside: {latency_us: 25, gb_per_s: 370}        # between two ranks of a node, each way
    gemm_tflops: 680                               # or by tokens of a slice: {1024: 604, 4096: 674}
    attention_tflops: {forward: 590, backward: 535, own_forward: 483, own_backward: 425}     # each likewise

and, where they are known,

    source: measured                               # or published, or facts
    between: {latency_us: 25, gb_per_s: 50}        # between nodes, a rank
    memory_gb_per_s: 4000                          # of the device: charges norms, RoPE, SwiGLU and sums
    host: {latency_us: 10, gb_per_s: 55}           # to pinned host memory, each way
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from slimpipe.plan.hardware import HardwareProfile
from slimpipe.plan.rates import SizedRate
from slimpipe.schedule import Network, PlanError, Rate

ATTENTION = ("forward", "backward", "own_forward", "own_backward")


def load_hardware(path: str | Path, key: str | None = None) -> HardwareProfile:
    """The profile of a YAML file. Raises PlanError, a line for each problem; `key` is the setting or option that named
    the file, for those lines."""
    where = str(path) if key is None else f"{key} = {path}"
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(
            f"{where}: cannot be read: {error.strerror}; give a file of configs/hardware, or one that slimpipe "
            "calibrate wrote"
        ) from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise PlanError(f"{where}: not a YAML text: {' '.join(str(error).split())}") from error
    problems = list(_problems(values, _KEYS, _OPTIONAL, where))
    if problems:
        raise PlanError("\n".join(problems))
    between, memory, host = (values.get(key) for key in ("between", "memory_gb_per_s", "host"))
    network = Network(_rate(values["inside"]), None if between is None else _rate(between), values["ranks_per_node"])
    return HardwareProfile(
        name=values["name"],
        network=network,
        gemm=SizedRate.of(values["gemm_tflops"], 1e12),
        **{key: SizedRate.of(values["attention_tflops"][key], 1e12) for key in ATTENTION},
        memory=None if memory is None else 1e9 * memory,
        host=None if host is None else _rate(host),
    )


def write_hardware(path: Path, profile: HardwareProfile, source: str, comment: str) -> None:
    """The profile as a file that `load_hardware` reads back, rates to four digits. `comment`: lines for its head."""
    network = profile.network
    rates = (profile.forward, profile.backward, profile.own_forward, profile.own_backward)
    values: dict[str, Any] = {
        "name": profile.name,
        "source": source,
        "ranks_per_node": network.ranks_per_node,
        "inside": _link(network.inside),
    }
    if network.between is not None:
        values["between"] = _link(network.between)
    if profile.host is not None:
        values["host"] = _link(profile.host)
    if profile.memory is not None:
        values["memory_gb_per_s"] = _digits(profile.memory / 1e9)
    values["gemm_tflops"] = _sized(profile.gemm)
    values["attention_tflops"] = {key: _sized(rate) for key, rate in zip(ATTENTION, rates, strict=True)}
    text = yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=120)
    path.write_text("".join(f"# {line}\n" for line in comment.splitlines()) + "\n" + text, encoding="utf-8")


def _link(rate: Rate) -> dict[str, float]:
    return {"latency_us": _digits(rate.latency * 1e6), "gb_per_s": _digits(rate.bandwidth / 1e9)}


def _sized(rate: SizedRate) -> float | dict[int, float]:
    if len(rate.points) == 1:
        return _digits(rate.points[0][1] / 1e12)
    return {tokens: _digits(value / 1e12) for tokens, value in rate.points}


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


class _Sized:
    """A number, or a mapping from tokens to numbers."""


_RATE: Any = {"latency_us": float, "gb_per_s": float}
_KEYS: dict[str, Any] = {
    "name": str,
    "ranks_per_node": int,
    "inside": _RATE,
    "gemm_tflops": _Sized,
    "attention_tflops": dict.fromkeys(ATTENTION, _Sized),
}
_OPTIONAL: dict[str, Any] = {"between": _RATE, "source": str, "memory_gb_per_s": float, "host": _RATE}


def _problems(values: Any, keys: Mapping[str, Any], optional: Mapping[str, Any], where: str) -> Iterator[str]:
    """What is wrong with a mapping: keys missing or unknown, and values that are not what `keys` and `optional` say."""
    known = {**keys, **optional}
    if not isinstance(values, dict):
        yield f"{where}: must be a mapping of the keys {', '.join(keys)}"
        return
    for key in values:
        if key not in known:
            yield f"{where}: {key}: unknown key; known are {', '.join(known)}"
    for key, kind in known.items():
        if key not in values:
            if key in keys:
                yield f"{where}: {key} is missing"
        elif isinstance(kind, dict):
            yield from _problems(values[key], kind, {}, f"{where}: {key}")
        elif kind is str:
            if not isinstance(values[key], str):
                yield f"{where}: {key} = {values[key]!r}: must be a word"
        elif kind is _Sized and isinstance(values[key], dict):
            yield from _sized_problems(values[key], f"{where}: {key}")
        elif not _is_number(values[key], kind) or values[key] < 0 or (values[key] == 0 and key != "latency_us"):
            least = ">= 0" if key == "latency_us" else "> 0"
            yield f"{where}: {key} = {values[key]!r}: must be a {'whole ' if kind is int else ''}number {least}"


def _sized_problems(values: dict[Any, Any], where: str) -> Iterator[str]:
    if not values:
        yield f"{where}: is empty; give a rate, or one for each number of tokens"
    for tokens, rate in values.items():
        if not _is_number(tokens, int) or tokens < 1:
            yield f"{where}: {tokens!r}: must be a whole number of tokens > 0"
        if not _is_number(rate, float) or rate <= 0:
            yield f"{where}: {tokens!r}: {rate!r}: must be a number > 0"


def _is_number(value: Any, kind: type) -> bool:
    return not isinstance(value, bool) and isinstance(value, int if kind is int else (int, float))


def _rate(values: dict[str, float]) -> Rate:
    return Rate(values["latency_us"] / 1e6, values["gb_per_s"] * 1e9)
