"""`train.attention: auto` on a GPU: the backend that is fastest for the run's own shape, by a short measurement.

What is timed is what a slice in mid-sequence does: forward and backward on its own block and on a past of half the
sequence. The result is kept in a small file a shape, device and set of versions, and for as long as the process lives.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimpipe.kernels.attention.base import AttentionBackend


@dataclass(frozen=True)
class AttentionShape:
    """A slice in mid-sequence: b sequences of s tokens behind `past` ones."""

    b: int
    s: int
    past: int
    heads: int
    kv_heads: int
    d: int
    dtype: str


@dataclass(frozen=True)
class Choice:
    """The backend that was taken, and what each candidate took, in milliseconds; None where it failed."""

    name: str
    milliseconds: Mapping[str, float | None]
    cached: bool

    def __str__(self) -> str:
        times = ", ".join(
            f"{name} failed" if time is None else f"{name} {time:.2f} ms" for name, time in self.milliseconds.items()
        )
        return f"{self.name} ({'measured before' if self.cached else 'measured'}: {times})"


Timer = Callable[[AttentionBackend, AttentionShape], float]


def fastest(
    shape: AttentionShape,
    candidates: Mapping[str, Callable[[], AttentionBackend]],
    versions: Mapping[str, str],
    folder: Path,
    timer: Timer,
) -> Choice:
    """The candidate that `timer` finds fastest, or what an earlier call with the same arguments found.

    `versions` names device, torch and packages: whatever may change the answer. A candidate that fails counts as not
    there; raises RuntimeError, with each one's reason, where all do. A cache that cannot be read or written is done
    without.
    """
    if len(candidates) == 1:
        return Choice(next(iter(candidates)), {}, cached=False)
    key = {"shape": asdict(shape), "candidates": sorted(candidates), "versions": dict(sorted(versions.items()))}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = folder / f"attention-{digest}.json"
    known = _read(path, key)
    if known is not None:
        return known
    times: dict[str, float | None] = {}
    reasons = []
    for name, make in candidates.items():
        try:
            times[name] = timer(make(), shape)
        except Exception as error:  # other people's packages raise what they like
            times[name] = None
            reasons.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
    ran = {name: time for name, time in times.items() if time is not None}
    if not ran:
        raise RuntimeError(f"train.attention = auto: no backend runs here; {'; '.join(reasons)}")
    choice = Choice(min(ran, key=lambda name: ran[name]), times, cached=False)
    _write(path, {"key": key, "name": choice.name, "milliseconds": times})
    return choice


def _read(path: Path, key: Mapping[str, Any]) -> Choice | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["key"] != key or found["name"] not in key["candidates"]:
            return None
        return Choice(found["name"], found["milliseconds"], cached=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, values: Mapping[str, Any]) -> None:
    """In one move: ranks that start together write the same file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(values, file, indent=1)
        os.replace(name, path)
    except OSError:
        return


def time_on_device(backend: AttentionBackend, shape: AttentionShape, runs: int = 3) -> float:
    """Milliseconds of one slice's forward and backward on the current GPU: the least of a few runs.

    Waits for the device; for before a run's first step.
    """
    q, k, v, dout = _inputs(shape)
    blocks = _blocks(backend, shape)
    found = []
    for index in range(runs + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for start, causal in blocks:
            keys, values = k[:, start[0] : start[1]], v[:, start[0] : start[1]]
            out, lse = backend.forward(q, keys, values, causal)
            backend.backward(dout, q, keys, values, out, lse, causal)
        end.record()
        end.synchronize()
        if index:  # the first compiles and loads
            found.append(begin.elapsed_time(end))
    return min(found)


def _blocks(backend: AttentionBackend, shape: AttentionShape) -> Sequence[tuple[tuple[int, int], bool]]:
    """(range of keys, causal): as `runtime.sliced_attention` would call it."""
    whole = shape.past + shape.s
    if backend.bottom_right or shape.past == 0:
        return [((0, whole), True)]
    return [((shape.past, whole), True), ((0, shape.past), False)]


def _inputs(shape: AttentionShape) -> list[Tensor]:
    sizes = [(shape.s, shape.heads), *[(shape.past + shape.s, shape.kv_heads)] * 2, (shape.s, shape.heads)]
    dtype: torch.dtype = getattr(torch, shape.dtype)
    return [torch.randn(shape.b, tokens, heads, shape.d, dtype=dtype, device="cuda") for tokens, heads in sizes]
