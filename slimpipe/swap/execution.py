"""A policy in the form that the executor follows: by number of the saved tensor and by operator. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field

from slimpipe.swap.features import Feature


@dataclass(frozen=True)
class Times:
    """Operators at which a tensor leaves the device, at which its copy back is started, and that needs it."""

    release: int
    prefetch: int
    first_use: int


@dataclass(frozen=True)
class ExecutionPlan:
    """`expected[i]`: what the i-th saved tensor of the step looks like; `packed_at[i]`: the operator it was saved at;
    `large`: the numbers of those that may be moved, for the others may be large enough in another step; `swaps[i]`:
    when it goes and comes back, for those that are moved. Of those that the backward asked for, `used_at[i]`: the
    operator at which it did; `fetch_at[i]`: when the copy back would start if it were moved against the plan."""

    expected: tuple[Feature, ...] = ()
    packed_at: tuple[int, ...] = ()
    large: tuple[int, ...] = ()
    swaps: dict[int, Times] = field(default_factory=dict)
    used_at: dict[int, int] = field(default_factory=dict)
    fetch_at: dict[int, int] = field(default_factory=dict)
    peak: int = 0
    """Bytes in use on the device at most, as planned."""

    @property
    def moved_bytes(self) -> int:
        return sum(self.expected[number].nbytes for number in self.swaps)
