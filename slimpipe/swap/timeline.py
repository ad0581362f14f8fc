"""What a policy is made from and what it is. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """A tensor that could be moved: saved at moment `birth`, needed by others up to `last_use`, by the backward from
    `first_use` on; birth <= last_use < first_use. `name` is unique."""

    name: int
    nbytes: int
    birth: int
    last_use: int
    first_use: int


@dataclass(frozen=True)
class Timeline:
    """A step that moves nothing: `seconds[k]` when moment k comes (never falling), `memory[k]` the most bytes in use
    from then to moment k + 1."""

    seconds: tuple[float, ...]
    memory: tuple[int, ...]


@dataclass(frozen=True)
class Limits:
    """Bytes on the device and in pinned host memory, bytes a second of the link."""

    gpu_bytes: int
    host_bytes: int
    out_rate: float
    in_rate: float


@dataclass(frozen=True)
class Swap:
    """The candidate is away from moment `release` up to moment `prefetch`, at which its copy back starts."""

    candidate: Candidate
    release: int
    prefetch: int


@dataclass(frozen=True)
class Policy:
    """`peak`: bytes in use at most with these swaps; `fits`: whether that is within the limit; `stalled`: seconds the
    compute stream is expected to wait for copies."""

    swaps: tuple[Swap, ...] = ()
    peak: int = 0
    fits: bool = True
    stalled: float = 0.0
    host_bytes: int = 0

    @property
    def moved_bytes(self) -> int:
        return sum(swap.candidate.nbytes for swap in self.swaps)
