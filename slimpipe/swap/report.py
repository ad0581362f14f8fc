"""What swapping did: counters of a run, and the table printed at its end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Counts:
    """Bytes and events since the manager was made."""

    steps: int = 0
    aborted_steps: int = 0
    moved_out: int = 0
    moved_in: int = 0
    planned_out: int = 0
    """Bytes moved out because a policy said so; the others of `moved_out` went for want of room."""
    fetched_late: int = 0
    """Bytes whose copy in was started only when the backward asked for them."""
    moves_out: int = 0
    prefetches: int = 0
    late_fetches: int = 0
    mismatches: int = 0
    fallbacks: int = 0
    still_referenced: int = 0
    """Bytes that were let go while someone else still held them: moved for nothing."""
    no_host_room: int = 0
    """Tensors kept on the device because the pinned memory was full."""
    drained_early: int = 0
    """Tensors let go before their planned operator, when memory ran short."""
    evicted: int = 0
    out_of_memory: int = 0
    modified: int = 0
    """Saved tensors that were written to before their copy was complete."""
    origins: Counter[str] = field(default_factory=Counter)
    """Where the tensors of `mismatches` and `fallbacks` came from."""

    def problem(self, what: str, origin: str) -> None:
        setattr(self, what, getattr(self, what) + 1)
        # A few distinct ones tell enough, and a run may see a new shape every step.
        if origin in self.origins or len(self.origins) < 200:
            self.origins[origin] += 1


def megabytes(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


def two_columns(title: str, rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows)])
