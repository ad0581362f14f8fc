"""Units that are away whatever the link says, where memory is over the budget all the same: compute waits for them.

Compute by compute, so many units go as it takes, or all where even that is not enough: those first for which compute
waits the shortest, and of these the one whose backward is farthest. One that is forced away for several computes is
away in between.

There may be thousands of computes with a thousand units on the device each, so none of them is looked at for every
compute. Most cost no wait: from when a copy begun behind the forward would be over to when one for the backward has to
begin. Those stand in the order in which they go, and which go is a place in that order, which moves little from one
compute to the next; of a unit that comes to stand before it or after, the computes in between are those that count.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import defaultdict
from math import floor, inf

from slimpipe.schedule.action import Unit
from slimpipe.schedule.swap_units import RankUnits, Window


def force(units: RankUnits, windows: dict[Unit, Window], budget: float) -> dict[Unit, Window]:
    """The windows with those that it takes to hold at most `budget` bytes during each compute, as far as can be."""
    return _Forced(units, windows, budget).windows


class _Forced:
    """`here`: units in flight that can go and are on the device. Each is either in `_free` or in `_waited_for`."""

    def __init__(self, units: RankUnits, windows: dict[Unit, Window], budget: float) -> None:
        self.windows = dict(windows)
        self._units, self._budget = units, budget
        self._here: set[Unit] = set()
        self._bytes_here = 0
        self._leaving = set(windows)
        """Those that leave by themselves later on."""
        self._waited_for: set[Unit] = set()
        self._free: list[int] = []
        """Those for which nothing waits, as minus their backwards, in order: the farthest goes first."""
        self._unit_of = {-at: unit for unit, at in units.backward.items()}
        self._going, self._bytes_going = 0, 0
        """How many of `_free` go where memory is over the budget."""
        self._since: dict[Unit, int] = {}
        """The compute from which on each of these has been among them."""
        self._leaving_free: list[int] = []
        """A heap of those of `_free` that were leaving when they came."""
        self._over: list[int] = []
        """Computes over the budget so far."""
        held = units.held(windows)
        self._less = [0] * (len(held) + 1)
        """Where bytes go that `held` does not know of (negative), and where it does again."""
        self._free_from = {unit: self._times(unit) for unit in units.forward if units.moved(unit)}
        self._run(held)

    def _times(self, unit: Unit) -> tuple[int, int]:
        """From which compute to before which one it is away at no cost: as `_wait`, which is 0 there alone."""
        begins, copy = self._units.begins, self._units.copy(unit)
        out = self._units.ends[self._units.forward[unit]] + copy
        back = bisect_right(begins, begins[self._units.backward[unit]], key=lambda begin: begin + copy)
        return bisect_left(begins, out), back - 1

    def _run(self, held: list[int]) -> None:
        comes, goes, turns = (defaultdict[int, list[Unit]](list) for _ in range(3))
        for unit, times in self._free_from.items():
            forward, backward = self._units.forward[unit], self._units.backward[unit]
            if forward + 1 < backward:
                comes[forward + 1].append(unit)
                goes[backward].append(unit)
            if unit in self.windows:
                goes[self.windows[unit].vacate].append(unit)
                if self.windows[unit].reload < backward:
                    comes[self.windows[unit].reload].append(unit)
            for at in times:
                turns[at].append(unit)
        away = 0
        for now, bytes_now in enumerate(held):
            for unit in comes[now]:
                self._come(unit, now)
            for unit in goes[now]:
                if now == self._units.backward[unit] or unit in self._leaving:
                    self._leaving.discard(unit)
                    self._go(unit)
            for unit in turns[now]:
                if unit in self._here:
                    self._go(unit)
                    self._come(unit, now)
            away += self._less[now]
            if bytes_now + away > self._budget:
                self._choose(now, bytes_now + away)

    def _choose(self, now: int, holds: int) -> None:
        """Who goes for compute `now`, which holds so much."""
        everyone = holds - self._bytes_here >= self._budget
        need = inf if everyone else holds - floor(self._budget)
        while self._bytes_going < need and self._going < len(self._free):
            unit = self._unit_of[self._free[self._going]]
            self._since[unit] = now
            self._going, self._bytes_going = self._going + 1, self._bytes_going + self._units.moved(unit)
        while self._going:
            unit = self._unit_of[self._free[self._going - 1]]
            if self._bytes_going - self._units.moved(unit) < need:
                break
            self._going, self._bytes_going = self._going - 1, self._bytes_going - self._units.moved(unit)
            self._stay(unit)
        self._over.append(now)
        chosen = list(self._waited_for) if everyone else self._shortest(now, need - self._bytes_going)
        while self._leaving_free and self._going and self._leaving_free[0] <= self._free[self._going - 1]:
            unit = self._unit_of[heapq.heappop(self._leaving_free)]
            if unit in self._leaving and unit not in self._waited_for:
                chosen.append(unit)
        for unit in chosen:
            self._force(unit, now)

    def _shortest(self, now: int, need: float) -> list[Unit]:
        """So many bytes of those that compute waits for, the shortest waits first."""
        if need <= 0:
            return []
        options = [(self._wait(unit, now), -self._units.backward[unit], unit) for unit in self._waited_for]
        heapq.heapify(options)
        found = []
        while need > 0:
            found.append(heapq.heappop(options)[2])
            need -= self._units.moved(found[-1])
        return found

    def _wait(self, unit: Unit, now: int) -> float:
        """About how long compute waits where the unit is away while compute `now` runs."""
        begins, copy = self._units.begins, self._units.copy(unit)
        late_out = max(0.0, self._units.ends[self._units.forward[unit]] + copy - begins[now])
        late_in = max(0.0, begins[now + 1] + copy - begins[self._units.backward[unit]])
        return late_out + late_in

    def _force(self, unit: Unit, now: int) -> None:
        if unit in self._leaving:
            self._leaving.remove(unit)
            self._less[now + 1] -= self._units.moved(unit)
            self._less[self.windows[unit].vacate] += self._units.moved(unit)
            self._go(unit)
        self._extend(unit, now, now)

    def _extend(self, unit: Unit, first: int, last: int) -> None:
        """It is away during these computes, and between them and when it is away in any case."""
        before = self.windows.get(unit, Window(first, first))
        self.windows[unit] = Window(min(before.vacate, first), max(before.reload, last + 1))

    # Who is here

    def _come(self, unit: Unit, now: int) -> None:
        self._here.add(unit)
        self._bytes_here += self._units.moved(unit)
        start, stop = self._free_from[unit]
        if not start <= now < stop:
            self._waited_for.add(unit)
            return
        key = -self._units.backward[unit]
        at = bisect_left(self._free, key)
        self._free.insert(at, key)
        if at < self._going:
            self._since[unit] = now
            self._going, self._bytes_going = self._going + 1, self._bytes_going + self._units.moved(unit)
        if unit in self._leaving:
            heapq.heappush(self._leaving_free, key)

    def _go(self, unit: Unit) -> None:
        """No matter, where it is away already."""
        if unit not in self._here:
            return
        self._here.remove(unit)
        self._bytes_here -= self._units.moved(unit)
        if unit in self._waited_for:
            self._waited_for.remove(unit)
            return
        at = bisect_left(self._free, -self._units.backward[unit])
        del self._free[at]
        if at < self._going:
            self._going, self._bytes_going = self._going - 1, self._bytes_going - self._units.moved(unit)
            self._stay(unit)

    def _stay(self, unit: Unit) -> None:
        """It is no longer among those that go: it was away for the computes over the budget until here."""
        first = bisect_left(self._over, self._since.pop(unit))
        if first < len(self._over):
            self._extend(unit, self._over[first], self._over[-1])
