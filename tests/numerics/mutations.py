"""Deliberate mistakes in the engine, of the kind that gives wrong gradients without a word. The tests must see each.

Each is a context that changes the engine inside one process while it is open.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from slimpipe.runtime import engine as engine_module
from slimpipe.runtime.engine import Engine
from slimpipe.runtime.kv_slots import LayerSlots, SlicePlace
from slimpipe.runtime.slice_context import SliceContext
from slimpipe.schedule import Op, Peaks, Plan, Unit, build, lower
from slimpipe.train import session as session_module
from slimpipe.train.planning import Planned

Mutation = Callable[[], contextlib.AbstractContextManager[Any]]
MUTATIONS: dict[str, Mutation] = {}


def mutated(name: str | None) -> contextlib.AbstractContextManager[Any]:
    """The named mutation's context; for None one that changes nothing."""
    return contextlib.nullcontext() if name is None else MUTATIONS[name]()


def mutation(make: Mutation) -> Mutation:
    MUTATIONS[make.__name__] = make
    return make


def _places(change: Callable[[Unit, SlicePlace], SlicePlace]) -> contextlib.AbstractContextManager[Any]:
    original = Engine.place
    return mock.patch.object(Engine, "place", lambda self, unit: change(unit, original(self, unit)))


@mutation
def past_misses_a_slot() -> contextlib.AbstractContextManager[Any]:
    """One slice of one microbatch does not see the first slot of its past."""

    def change(unit: Unit, place: SlicePlace) -> SlicePlace:
        if (unit.microbatch, unit.slice) != (1, 2):
            return place
        (start, stop), *rest = place.past
        return replace(place, past=tuple(r for r in ((start + 1, stop), *rest) if r[0] < r[1]))

    return _places(change)


@mutation
def past_has_a_stranger() -> contextlib.AbstractContextManager[Any]:
    """One slice attends to its own slot once more, as if it were past."""
    return _places(
        lambda unit, place: (
            replace(place, past=(*place.past, (place.slot, place.slot + 1)))
            if (unit.microbatch, unit.slice) == (1, 2)
            else place
        )
    )


@mutation
def two_slices_share_a_slot() -> contextlib.AbstractContextManager[Any]:
    """Slice 1 of microbatch 0 is written over slice 0."""
    return _places(lambda unit, place: replace(place, slot=0) if (unit.microbatch, unit.slice) == (0, 1) else place)


@mutation
def positions_start_anew_in_every_slice() -> contextlib.AbstractContextManager[Any]:
    original = SliceContext
    return mock.patch.object(
        engine_module, "SliceContext", lambda positions, *rest: original(positions - positions[0], *rest)
    )


@mutation
def gradients_from_later_slices_are_dropped() -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(LayerSlots, "total_gradient", lambda self, place, dk, dv: (dk, dv))


@mutation
def accumulator_is_overwritten() -> contextlib.AbstractContextManager[Any]:
    """Every later slice's dK, dV replaces the sum instead of adding to it."""
    original = LayerSlots.add_gradient
    return mock.patch.object(
        LayerSlots, "add_gradient", lambda self, a, b, dk, dv, first: original(self, a, b, dk, dv, True)
    )


@mutation
def accumulator_is_stale() -> contextlib.AbstractContextManager[Any]:
    """The first backward of a sequence adds to what an earlier sequence left."""
    original = LayerSlots.add_gradient
    return mock.patch.object(
        LayerSlots, "add_gradient", lambda self, a, b, dk, dv, first: original(self, a, b, dk, dv, False)
    )


@mutation
def accumulated_parts_are_rounded_to_bfloat16() -> contextlib.AbstractContextManager[Any]:
    original = LayerSlots.add_gradient
    return mock.patch.object(
        LayerSlots,
        "add_gradient",
        lambda self, a, b, dk, dv, first: original(self, a, b, dk.bfloat16(), dv.bfloat16(), first),
    )


@mutation
def backwards_in_ascending_order() -> contextlib.AbstractContextManager[Any]:
    """A plan that the checker refuses, run unchecked."""

    def unchecked(config: Any, progress: Any = None) -> Planned:
        plan = build(config.pipeline.schedule, config.shape)
        turn = {unit: unit._replace(slice=config.shape.n - 1 - unit.slice) for unit in _units(plan)}
        ranks = tuple(
            tuple(a._replace(unit=turn[a.unit]) if a.op is Op.BACKWARD else a for a in actions)
            for actions in plan.ranks
        )
        broken = lower(replace(plan, ranks=ranks))
        return Planned(broken, None, 2, Peaks((0,), ((0,),), (0,)))

    return mock.patch.object(session_module, "make_plan", unchecked)


def _units(plan: Plan) -> set[Unit]:
    return {action.unit for actions in plan.ranks for action in actions}


@mutation
def last_target_of_each_slice_is_lost() -> contextlib.AbstractContextManager[Any]:
    """What comes of shifting labels after the cut."""
    original = Engine._labels

    def labels(self: Engine, unit: Unit) -> torch.Tensor:
        cut = original(self, unit).clone()
        if unit.slice < self.shape.n - 1:
            cut[:, -1] = -100
        return cut

    return mock.patch.object(Engine, "_labels", labels)


@mutation
def scale_is_the_microbatchs_own() -> contextlib.AbstractContextManager[Any]:
    """A mean of the microbatches' means, in place of the mean over all valid tokens."""
    original = Engine.forward

    def forward(self: Engine, action: Any) -> None:
        batch = self._batch
        valid = int((batch.labels[action.unit.microbatch] != -100).sum())
        self._batch = replace(batch, scale=torch.full_like(batch.scale, 1 / (valid * self.shape.m)))
        original(self, action)
        self._batch = batch

    # The table of methods is filled when an engine is made, which is inside this context.
    return mock.patch.object(Engine, "forward", forward)


@mutation
def tied_gradients_are_not_summed() -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(session_module, "sum_tied", lambda gradient, group, carrier: None)


@contextlib.contextmanager
def _zeroed_once(method: str) -> Iterator[None]:
    """The first tensor that any rank hands on through `method` becomes zero."""
    original = getattr(Engine, method)

    def changed(self: Engine, action: Any, tensor: torch.Tensor) -> None:
        broken = action.op is Op.BACKWARD and (action.unit.microbatch, action.unit.slice) == (1, 0)
        original(self, action, torch.zeros_like(tensor) if broken else tensor)

    with mock.patch.object(Engine, method, changed):
        yield


@mutation
def one_gradient_is_lost_between_stages() -> contextlib.AbstractContextManager[Any]:
    return _zeroed_once("_hand_on")
