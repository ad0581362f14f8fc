"""WarmUp -> GenPolicy -> Stable: when to look closely, which plan to follow, which to keep. No torch here.

- *WarmUp*: until a kind of step was seen `stable_steps` times.
- *GenPolicy*: one step is profiled in detail; plans are made from it; each is tried in a step of its own and timed; the
  fastest is kept. None is timed in the step that it was made from.
- *Stable*: steps follow the plan. A step of another kind (an evaluation, a last short batch, a branch that flips) is
  looked up among the kinds known; a new one that was seen `stable_steps` times gets plans of its own, and the old ones
  stay.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from slimpipe.swap.execution import ExecutionPlan
from slimpipe.swap.signature import Signature, same_sequence

LOOKS = 4
"""Steps profiled in a row in the hope that one is of the kind that wants plans."""


class Stage(Enum):
    WARM_UP = "WarmUp"
    GEN_POLICY = "GenPolicy"
    STABLE = "Stable"


@dataclass(eq=False)
class Known:
    """A kind of step, with its plan, and the plans still to be tried, each with the seconds that its steps took."""

    signature: Signature
    plan: ExecutionPlan | None = None
    trials: list[ExecutionPlan] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    over_budget: int = 0
    followers: deque[Known] = field(default_factory=lambda: deque(maxlen=16), repr=False)
    """The kinds of the steps that came after steps of this one, the latest last."""

    def has(self, plan: ExecutionPlan | None) -> bool:
        """Whether the plan is one of this kind's."""
        return plan is not None and any(plan is own for own in (self.plan, *self.trials))

    def likely_next(self) -> Known:
        """The most frequent follower; this kind itself where nothing is known."""
        if not self.followers:
            return self
        return max(reversed(self.followers), key=lambda kind: sum(other is kind for other in self.followers))


@dataclass(frozen=True)
class Orders:
    """For the next step: follow `plan` (None: none is known), and profile in detail or not."""

    plan: ExecutionPlan | None
    detailed: bool


class StageMachine:
    def __init__(self, stable_steps: int, length_change: float, similarity: float, sequences: int = 16) -> None:
        self.stage = Stage.WARM_UP
        self.known: list[Known] = []
        self.changes = 0
        """Steps that were of another kind than the one before."""
        self._stable_steps, self._sequences = stable_steps, sequences
        self._length_change, self._similarity = length_change, similarity
        self._current: Known | None = None
        """The kind that the next step is expected to be."""
        self._seen: Known | None = None
        """The kind of the last step."""
        self._last: Signature | None = None
        self._strangers: list[tuple[Signature, int]] = []
        """Kinds of step without a plan, with the number of times each was seen; the latest last."""
        self._looks = 0
        """Of the next steps, how many are profiled in detail until one is of a kind that wants plans."""

    def orders(self) -> Orders:
        current = self._current
        if current is None:
            return Orders(None, self._looks > 0)
        plan = current.trials[len(current.seconds)] if current.trials else current.plan
        return Orders(plan, self._looks > 0)

    def trying(self) -> bool:
        """Whether the next step's time is wanted."""
        return self._current is not None and bool(self._current.trials)

    def plans(self) -> list[ExecutionPlan]:
        return [known.plan for known in self.known if known.plan is not None]

    def saw(self, signature: Signature, seconds: float, followed: ExecutionPlan | None, over_budget: bool) -> bool:
        """A whole step that was not profiled in detail: whether the plan it followed was one of its own kind's."""
        self._count_change(signature)
        found = self._find(signature)
        own = found is not None and found.has(followed)
        if found is None:
            rounds, rest = divmod(self._meet(signature), self._stable_steps)
            # A rare kind may not come again soon: the next round of looks waits until it was seen twice as often.
            if rest == 0 and rounds & (rounds - 1) == 0:
                self._looks = LOOKS
            self._seen = None
        else:
            self._expect(found)
            self._time(found, seconds, followed)
            self._outgrown(found, over_budget)
        self._name_stage()
        return own

    def profiled(self, signature: Signature) -> bool:
        """A step that was profiled in detail: whether plans are wanted for its kind. Then `made` is due."""
        self._count_change(signature)
        self._looks -= 1
        found = self._find(signature)
        if found is not None:
            # Another kind than the one that was to be looked at; that one will come.
            self._expect(found)
            self._name_stage()
            return False
        self._name_stage()
        return self._meet(signature) > self._stable_steps

    def _expect(self, found: Known) -> None:
        """Training and evaluation alternate in some pattern: what comes next is what came next before."""
        if self._seen is not None:
            self._seen.followers.append(found)
        self._seen = found
        self._current = found if found.trials else found.likely_next()

    def _meet(self, stranger: Signature) -> int:
        """How often this kind was seen, this time included."""
        count = 1 + next((n for other, n in self._strangers if self._same(other, stranger)), 0)
        others = [(other, n) for other, n in self._strangers if not self._same(other, stranger)]
        self._strangers = [*others[-(self._sequences - 1) :], (stranger, count)]
        return count

    def _count_change(self, signature: Signature) -> None:
        if self._last is not None and not self._same(signature, self._last):
            self.changes += 1
        self._last = signature

    def made(self, signature: Signature, plans: list[ExecutionPlan]) -> None:
        """Plans for that kind of step, the first one first."""
        known = Known(signature, plan=plans[0], trials=plans if len(plans) > 1 else [])
        self.known = [other for other in self.known if not self._same(other.signature, signature)]
        self.known = [*self.known[-(self._sequences - 1) :], known]
        self._current, self._seen, self._looks = known, known, 0
        self._strangers = [(other, n) for other, n in self._strangers if not self._same(other, signature)]
        self._name_stage()

    def _time(self, known: Known, seconds: float, followed: ExecutionPlan | None) -> None:
        if not known.trials or followed is not known.trials[len(known.seconds)]:
            return
        known.seconds.append(seconds)
        if len(known.seconds) == len(known.trials):
            fastest = min(range(len(known.trials)), key=lambda i: known.seconds[i])
            known.plan, known.trials, known.seconds = known.trials[fastest], [], []

    def _outgrown(self, known: Known, over_budget: bool) -> None:
        """A plan under which steps go over the budget time and again was made for something else."""
        known.over_budget = known.over_budget + 1 if over_budget and not known.trials else 0
        if known.over_budget > 2 * self._stable_steps:
            self.known.remove(known)
            for other in self.known:
                other.followers.clear()
            self._current, self._seen, self._looks = None, None, LOOKS
            self._strangers.append((known.signature, self._stable_steps))

    def _find(self, signature: Signature) -> Known | None:
        return next((known for known in reversed(self.known) if self._same(known.signature, signature)), None)

    def _same(self, a: Signature, b: Signature) -> bool:
        return same_sequence(a, b, self._length_change, self._similarity)

    def _name_stage(self) -> None:
        if self._looks > 0 or (self._current is not None and self._current.trials):
            self.stage = Stage.GEN_POLICY
        else:
            self.stage = Stage.STABLE if self.known else Stage.WARM_UP
