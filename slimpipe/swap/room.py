"""The room that steps need beside their plan, learned from those that went over the budget. No torch here.

A plan keeps the budget on the step that it was made from. Where sizes change, other steps that follow it go over: by
what is larger than in the profile, and by what is saved before anything can leave.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST = 0.25
"""Share of the budget that is kept free at most."""


@dataclass
class Room:
    """Bytes. `excess`: what steps that followed a plan of their own kind needed beside it, 0 where all kept the budget;
    `largest`: the largest tensor that one of them saved. Neither falls again."""

    excess: int = 0
    largest: int = 0

    def learn(self, excess: int, largest: int, budget: int) -> None:
        """`excess`: bytes by which such a step went over `budget`, 0 or less where it did not."""
        # What was kept free did not suffice: as much again is needed as the step went over by.
        self.excess = min(self.excess + max(0, excess), int(MOST * budget))
        self.largest = max(self.largest, largest)

    def ahead(self, known: bool) -> int:
        """Bytes to be left free when a tensor is saved in a step that differs from its plan: nothing while no step went
        over. After a tensor that the plan does not know another such one may come, as large as any."""
        if self.excess == 0:
            return 0
        return self.excess if known else self.excess + self.largest
