"""The settings of the swap manager, with the paper's defaults where it has them."""

from __future__ import annotations

from dataclasses import dataclass

from slimpipe.swap.observer import Kind


@dataclass(frozen=True)
class SwapSettings:
    """Raises ValueError for what makes no sense."""

    stable_steps: int = 2
    """Similar steps before a policy is made (the paper's m)."""
    policies: int = 5
    """Policies tried, of which the fastest is kept (the paper's n)."""
    length_change: float = 0.05
    """A step is another one where a segment's length differs by more than this share..."""
    similarity: float = 0.95
    """...or the cosine of a segment's operator histograms is less than this."""
    min_bytes: int = 1 << 20
    """Smaller tensors stay on the device."""
    size_weight: float = 2.0
    """C in score = normalised coverage + C * normalised cube root of the size."""
    margin: float = 0.02
    """Share of the GPU budget that policies leave free."""
    headroom: float = 0.10
    """Share of the GPU budget kept free where no policy says what is to come."""
    arena_bytes: int = 1 << 30
    """Pinned memory is taken in blocks of this size, rounded down to a power of two."""
    move_share: float | None = None
    """Move this share of the candidates' bytes, whether memory needs it or not; None: the least that fits."""
    observer: Kind = "auto"
    """What counts operators: cpp, dispatch, hooks, or auto: cpp where it is built, else hooks."""

    def __post_init__(self) -> None:
        def need(key: str, good: bool, allowed: str) -> None:
            if not good:
                raise ValueError(f"swap: {key} = {getattr(self, key)}: must be {allowed}")

        need("stable_steps", self.stable_steps >= 1, "at least 1")
        need("policies", self.policies >= 1, "at least 1")
        need("length_change", 0 <= self.length_change < 1, "in [0, 1)")
        need("similarity", 0 < self.similarity <= 1, "in (0, 1]")
        need("min_bytes", self.min_bytes >= 1, "at least 1")
        need("size_weight", self.size_weight >= 0, "at least 0")
        need("margin", 0 <= self.margin < 1, "in [0, 1)")
        need("headroom", 0 <= self.headroom < 1, "in [0, 1)")
        need("arena_bytes", self.arena_bytes >= 4096, "at least 4096")
        need("move_share", self.move_share is None or 0 <= self.move_share <= 1, "in [0, 1], or None")
        need("observer", self.observer in ("auto", "cpp", "dispatch", "hooks"), "auto, cpp, dispatch or hooks")
