"""Hardware profiles: what a GPU computes and a link carries, in a small YAML file, and what follows for a schedule.

    name: H200
    ranks_per_node: 8
    inside: {latency_us: 25, gb_per_s: 370}        # between two ranks of a node, each way
    between: {latency_us: 25, gb_per_s: 50}        # between nodes, a rank
    gemm_tflops: 680
    attention_tflops: {forward: 590, backward: 535, own_forward: 483, own_backward: 425}

Attention rates count 4 and 10 operations a query, key and width of a head, forward and backward, half of that within
the own slice, which is causal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from slimpipe.plan.flops import layer_flops_per_token
from slimpipe.schedule import LinkCost, Load, LoanBytes, Network, PlanError, Rate, Work

if TYPE_CHECKING:
    from slimpipe.config.sections import ModelConfig


@dataclass(frozen=True)
class HardwareProfile:
    """Times in seconds, sizes in bytes, operations a second."""

    name: str
    network: Network
    gemm: float
    forward: float
    backward: float
    own_forward: float
    own_backward: float

    def work(self, model: ModelConfig, layers: int, slice_tokens: int, micro_batch: int = 1) -> Work:
        """What units of `layers` layers and `slice_tokens` tokens consist of, in seconds."""
        scale = layers * micro_batch
        gemm, _ = layer_flops_per_token(model, slice_tokens)
        dense = scale * slice_tokens * gemm / self.gemm
        a_token = scale * slice_tokens * 4.0 * model.heads * model.head_dim
        own = a_token * slice_tokens / 2
        return Work(
            Load(dense, own / self.own_forward, a_token / self.forward),
            Load(2 * dense, 2.5 * own / self.own_backward, 2.5 * a_token / self.backward),
            slice_tokens,
        )

    def link(self, model: ModelConfig, p: int, slice_tokens: int, micro_batch: int = 1, element: int = 2) -> LinkCost:
        """What carries hidden states between stages: the slower of the links that p ranks use."""
        rate = self.network.inside if p <= self.network.ranks_per_node else self.network.between
        return LinkCost(rate.latency, rate.bandwidth, element * micro_batch * slice_tokens * model.hidden_size)


def loan_bytes(
    model: ModelConfig, slice_tokens: int, micro_batch: int = 1, element: int = 2, again: bool = False
) -> LoanBytes:
    """What a loan sends in one layer; `element` bytes a number, LSE in fp32. `again`: backwards run attention again."""
    return LoanBytes(
        kv_token=2 * element * micro_batch * model.kv_heads * model.head_dim,
        query=element * micro_batch * slice_tokens * model.heads * model.head_dim,
        lse=4 * micro_batch * slice_tokens * model.heads,
        again=again,
    )


def before_attention(model: ModelConfig) -> float:
    """The part of a layer's GEMMs that stands in front of its attention: the projections to Q, K and V."""
    q_width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return (q_width + 2 * kv_width) / (2 * q_width + 2 * kv_width + 3 * model.intermediate_size)


def load_hardware(path: str | Path) -> HardwareProfile:
    """The profile of a YAML file. Raises PlanError, a line for each problem."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise PlanError(f"{path}: not a YAML text: {' '.join(str(error).split())}") from error
    problems = list(_problems(values, _KEYS, str(path)))
    if problems:
        raise PlanError("\n".join(problems))
    attention = values["attention_tflops"]
    return HardwareProfile(
        values["name"],
        Network(_rate(values["inside"]), _rate(values["between"]), values["ranks_per_node"]),
        1e12 * values["gemm_tflops"],
        *(1e12 * attention[key] for key in ("forward", "backward", "own_forward", "own_backward")),
    )


_RATE = {"latency_us": float, "gb_per_s": float}
_KEYS: dict[str, Any] = {
    "name": str,
    "ranks_per_node": int,
    "inside": _RATE,
    "between": _RATE,
    "gemm_tflops": float,
    "attention_tflops": dict.fromkeys(("forward", "backward", "own_forward", "own_backward"), float),
}


def _problems(values: Any, keys: dict[str, Any], where: str) -> Iterator[str]:
    """What is wrong with a mapping: keys missing or unknown, and values that are not what `keys` says."""
    if not isinstance(values, dict):
        yield f"{where}: must be a mapping of the keys {', '.join(keys)}"
        return
    for key in values:
        if key not in keys:
            yield f"{where}: {key}: unknown key; known are {', '.join(keys)}"
    for key, kind in keys.items():
        if key not in values:
            yield f"{where}: {key} is missing"
        elif isinstance(kind, dict):
            yield from _problems(values[key], kind, f"{where}: {key}")
        elif kind is str:
            if not isinstance(values[key], str):
                yield f"{where}: {key} = {values[key]!r}: must be a word"
        elif not _is_number(values[key], kind) or values[key] < 0 or (values[key] == 0 and key != "latency_us"):
            least = ">= 0" if key == "latency_us" else "> 0"
            yield f"{where}: {key} = {values[key]!r}: must be a {'whole ' if kind is int else ''}number {least}"


def _is_number(value: Any, kind: type) -> bool:
    return not isinstance(value, bool) and isinstance(value, int if kind is int else (int, float))


def _rate(values: dict[str, float]) -> Rate:
    return Rate(values["latency_us"] / 1e6, values["gb_per_s"] * 1e9)
