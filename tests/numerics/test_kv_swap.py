"""Keys and values in host memory, by layer: every number is, bit for bit, what it is with them on the device; on
streams whose copies come as late as they may, or in odd orders."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from slimpipe.config import ConfigError
from slimpipe.runtime import kv_streaming
from slimpipe.runtime.kv_streaming import SlotStreams, StreamedSlots
from slimpipe.swap import SimulatedStreams
from slimpipe.swap.streams import Event
from slimpipe.train.forecast import Forecast
from slimpipe.train.planning import make_plan
from slimpipe.train.session import Session
from slimpipe.train.swapping import MARGIN, pinning_slots, plan_swaps
from tests.numerics.harness import batch_of, case, config_of, copies
from tests.numerics.test_swap import numbers
from tests.support.cover import Case
from tests.support.pool import Pool

CPU = torch.device("cpu")
GIB = 2**30


def with_keys(layout: Case, swap: str | float = "off", **sections: Any) -> Any:
    return config_of(layout, memory={"recompute": layout.recompute, "swap": swap, "kv_swap": "on"}, **sections)


def compare(rank: int, world: int, layout: Case, swap: str | float, order: Any) -> dict[str, Any]:
    """On a rank: the same with keys and values on the device and on the host; and what that moved and took."""
    expected = numbers(Session(config_of(layout)), layout)
    streams = SimulatedStreams(order=order, seed=rank)
    session = Session(with_keys(layout, swap), streams=streams)
    found = numbers(session, layout)
    assert len(found) == len(expected)
    kv, keys = session.planned.kv, session.slot_streams
    assert kv is not None and keys is not None
    terms = session.footprint.terms
    return {
        "different": [i for i, pair in enumerate(zip(found, expected, strict=True)) if not torch.equal(*pair)],
        "faults": streams.faults,
        "moved": (keys.moved_out, keys.moved_in),
        "planned": kv.moved(session.plan, rank, session.engine.slots),
        "device": keys.device_bytes,
        "forecast": terms["KV slots"] + terms["dK, dV"],
        "host": keys.arenas.in_use,
        "host forecast": session.planned.kv_bytes(rank),
    }


LAYOUTS = [
    (case(n=4, m=1), "off", "late"),
    (case(n=4, m=2, v=2, recompute="norms", kv="mha"), "off", "random"),
    (case(pp=2, n=1, m=3, schedule="1f1b", recompute="mlp"), "off", "early"),
    (case(pp=2, n=4, m=1, recompute="mlp"), 1.0, "late"),
    (case(pp=2, n=4, m=2, recompute="full", vocab_parallel=True), 0.5, "random"),
    (case(pp=2, n=4, m=3, v=2, recompute="all_but_attention", vocab_parallel=True, tied=True), 0.7, "late"),
    (case(pp=2, n=4, m=2, tied=True, qk_norm=True, mask="ragged", micro_batch=2), "off", "late"),
    (case(pp=2, n=8, m=2, exchange="balanced", granule=2, vocab_parallel=True), "off", "late"),
    (case(pp=2, n=4, m=2, layers="uneven", recompute="norms"), 1.0, "late"),
    (case(pp=3, n=4, m=2, v=2, recompute="none"), "off", "random"),
    (case(pp=3, n=8, m=2, exchange="pairwise", granule=4, recompute="full", vocab_parallel=True), "off", "random"),
    (case(pp=4, n=8, m=1, exchange="balanced", granule=2, keep="kv", vocab_parallel=True), 1.0, "late"),
    # One layer a chunk: the next layer is the same one again.
    (case(pp=4, n=4, m=3, v=2, recompute="mlp"), "off", "late"),
]


@pytest.mark.parametrize(("layout", "swap", "order"), LAYOUTS, ids=lambda value: str(value).replace(" ", ""))
def test_bitwise(layout: Case, swap: str | float, order: str, pool: Callable[[int], Pool]) -> None:
    for report in pool(layout.pp).run(compare, layout, swap, order):
        assert report["different"] == report["faults"] == []
        assert report["moved"] == report["planned"]
        assert min(report["planned"]) > 0
        assert report["device"] == report["forecast"]
        assert report["host"] == report["host forecast"]


def test_what_is_not_expected_is_served() -> None:
    """Visits in another order than was said, or that nobody has said: only later."""
    layout = case(n=4, m=2)
    expected = numbers(Session(config_of(layout)), layout)
    for visits in ((), tuple):
        session = Session(with_keys(layout), streams=SimulatedStreams(order="late"))
        said = session.engine._visits
        session.engine._visits = said[::-2] if visits else ()
        found = numbers(session, layout)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("model", ["Unlike", "Sparse"])
def test_layers_that_differ(model: str) -> None:
    """In heads, and in whether they attend at all."""
    layout = case(n=4, m=2, v=2)
    sections = {"model": {"name": f"tests.support.unlike_models:{model}"}}
    expected = numbers(Session(config_of(layout, **sections)), layout)
    session = Session(with_keys(layout, **sections), streams=SimulatedStreams(order="late"))
    assert all(torch.equal(*pair) for pair in zip(numbers(session, layout), expected, strict=True))
    keys = session.slot_streams
    assert keys is not None
    terms = session.footprint.terms
    assert keys.device_bytes == terms["KV slots"] + terms["dK, dV"]
    assert 0 < keys.arenas.in_use < session.planned.kv_bytes(0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtypes": [["float32", "bfloat16", "float32"]]}, "k bfloat16 [1, 16, 2, 8], v float32 [1, 16, 2, 8]"),
        ({"dtypes": [["float32"] * 3], "width": 6}, "k float32 [1, 16, 2, 8], v float32 [1, 16, 2, 6]"),
    ],
    ids=["dtype", "width"],
)
def test_values_unlike_their_keys_are_refused(options: dict[str, Any], said: str) -> None:
    """In a room that is made for keys, values would be rounded to their dtype."""
    sections = {"model": {"name": "tests.support.unlike_models:UnequalLayers", "options": options}}
    Session(config_of(case(n=4), **sections))
    with pytest.raises(ValueError, match=f"^memory.kv_swap: layer 0 attends with {re.escape(said)}"):
        Session(with_keys(case(n=4), **sections), streams=SimulatedStreams())


# ---- what is left out shows ----


def no_wait() -> AbstractContextManager[Any]:
    return mock.patch.object(SimulatedStreams, "wait", lambda self, event: None)


Waits = tuple[list[Event], list[Event]]


def _copies_in_without(what: Callable[[Any, list[Event]], Waits]) -> AbstractContextManager[Any]:
    original = SlotStreams._copy_in

    def copy_in(self: Any, room: Any, host: Any, ranges: Any, written: list[Event]) -> list[Event]:
        room.after, written = what(room, written)
        return original(self, room, host, ranges, written)

    return mock.patch.object(SlotStreams, "_copy_in", copy_in)


def copies_in_do_not_wait_for_what_they_read() -> AbstractContextManager[Any]:
    return _copies_in_without(lambda room, written: (room.after, []))


def rooms_are_filled_while_they_are_read() -> AbstractContextManager[Any]:
    return _copies_in_without(lambda room, written: ([], written))


def slots_are_fetched_before_they_are_written() -> AbstractContextManager[Any]:
    return mock.patch.object(kv_streaming, "_both", lambda some, others: ())


def one_room() -> AbstractContextManager[Any]:
    """The next layer's copies go where this one's compute is."""
    return mock.patch.object(kv_streaming._Kind, "next", lambda self: self.rooms[0])


def gradients_stay() -> AbstractContextManager[Any]:
    original = StreamedSlots.leave

    def leave(self: StreamedSlots) -> None:
        current = self._streams._current
        assert current is not None
        current.gradients = None
        original(self)

    return mock.patch.object(StreamedSlots, "leave", leave)


BROKEN = (
    no_wait,
    copies_in_do_not_wait_for_what_they_read,
    rooms_are_filled_while_they_are_read,
    slots_are_fetched_before_they_are_written,
    one_room,
    gradients_stay,
)


@pytest.mark.parametrize("broken", [None, *BROKEN], ids=lambda broken: "sound" if broken is None else broken.__name__)
def test_what_is_left_out_gives_wrong_numbers(broken: Callable[[], AbstractContextManager[Any]] | None) -> None:
    layout = case(n=4, m=2)
    plain = Session(config_of(layout))
    expected = plain.step_gradients(*batch_of(layout)), copies(plain.gradients())
    session = Session(with_keys(layout), streams=SimulatedStreams(order="late"))
    with nullcontext() if broken is None else broken():
        loss = session.step_gradients(*batch_of(layout))
    found = session.gradients()
    same = loss == expected[0] and all(torch.equal(found[name], value) for name, value in expected[1].items())
    assert same == (broken is None)


# ---- memory, refusals, and what is told ----

LONG = case(pp=2, n=8, m=2, recompute="all_but_attention")


def long(**memory: Any) -> Any:
    """Of three layers a rank: with two, of which one is there and the other under way, nothing is saved."""
    return config_of(LONG, model={"layers": 6}, memory={"recompute": LONG.recompute, **memory})


def auto(budget: float, **more: Any) -> Any:
    return long(swap="auto", gpu_budget_gib=budget, **more)


def test_auto_streams_where_activations_are_not_enough() -> None:
    """On the ranks where they are not, and on no other. With budgets within reach of moving activations none does."""
    plan = make_plan(long())
    config = long(swap=1.0)
    everything = Forecast(config, plan_swaps(config, plan, CPU), CPU).memory
    config = long(swap=1.0, kv_swap="on")
    reached = [found.total for found in everything]
    streamed = Forecast(config, plan_swaps(config, plan, CPU), CPU).memory
    saved = [kept.total - found.total for kept, found in zip(everything, streamed, strict=True)]
    first, second = sorted(range(2), key=lambda rank: reached[rank])
    between = reached[second] - saved[second] / 2
    assert between > reached[first]
    roomy = plan_swaps(auto(1.02 * max(reached) / GIB), plan, CPU)
    assert roomy.kv is None and roomy.swap is not None and roomy.swap.fits
    one = plan_swaps(auto(between / GIB), plan, CPU)
    assert one.kv is not None and one.swap is not None and one.swap.fits
    assert [one.kv.ranks[rank] for rank in (first, second)] == [False, True]
    assert Forecast(long(), one, CPU).memory[second].total <= between
    off = plan_swaps(auto(between / GIB, kv_swap="off"), plan, CPU)
    assert off.kv is None and off.swap is not None and not off.swap.fits


def step_on_unlike_devices(rank: int, world: int, sizes: tuple[int, int]) -> tuple[dict[str, Any], Any]:
    """What this rank's own plan moves, and a step's waits and swaps."""
    with mock.patch.object(Forecast, "device_bytes", property(lambda self: sizes[rank])):
        session = Session(long(swap="auto"))
    metrics = session.train_step(*batch_of(LONG))
    moved = {"units": session.swaps is not None, "keys": session.slot_streams is not None}
    return moved, (metrics.loss, metrics.waits, metrics.swap)


@pytest.mark.parametrize("small", [0, 1])
def test_devices_of_unlike_memory(small: int, pool: Callable[[int], Pool]) -> None:
    """A rank whose device has room for all still takes part in what is collective for those that move."""
    config = long(swap=1.0)
    reached = Forecast(config, plan_swaps(config, make_plan(long()), CPU), CPU).memory
    sizes = [GIB, GIB]
    sizes[small] = round(min(found.total for found in reached) * 0.97 / (1 - MARGIN))
    reports = pool(2).run(step_on_unlike_devices, tuple(sizes))
    assert [moved["keys"] for moved, _ in reports] == [rank == small for rank in range(2)]
    assert not reports[1 - small][0]["units"]
    assert reports[0][1] == reports[1][1]
    swap = reports[0][1][2]
    assert [bytes > 0 for bytes in swap.kv_out_bytes] == [rank == small for rank in range(2)]


def test_auto_is_nothing_without_a_budget() -> None:
    """With `swap` off or a share, keys and values stay; and on a CPU without a budget all does."""
    plan = make_plan(long())
    for swap in ("off", 0.5, "auto"):
        assert plan_swaps(long(swap=swap), plan, CPU).kv is None


def test_metrics_say_what_streamed() -> None:
    layout = case(n=4, m=2)
    session = Session(with_keys(layout), streams=SimulatedStreams())
    metrics = session.train_step(*batch_of(layout))
    found, keys, kv = metrics.swap, session.slot_streams, session.planned.kv
    assert found is not None and keys is not None and kv is not None
    assert (found.kv_out_bytes[0], found.kv_back_bytes[0]) == kv.moved(session.plan, 0, session.engine.slots)
    assert found.out_bytes == found.back_bytes == found.kept_bytes == (0,)
    assert found.pinned_bytes == (keys.arenas.pinned,)
    assert found.exposed_s == found.exposed_kv_s > 0
    assert metrics.waits["KV"] > 0 and "V" not in metrics.waits


def test_nothing_grows_from_step_to_step() -> None:
    layout = case(n=4, m=2)
    streams = SimulatedStreams()
    session = Session(with_keys(layout), streams=streams)
    keys = session.slot_streams
    assert keys is not None
    seen = []
    for _ in range(3):
        session.train_step(*batch_of(layout))
        seen.append((keys.arenas.pinned, keys.arenas.in_use, streams.memory_in_use(), streams.under_way()))
    assert seen[1:] == seen[:-1]
    assert seen[0][2] == keys.device_bytes


def test_slots_of_any_size_fill_arenas(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is pinned is what was said, up to an arena, and a budget of just that suffices."""
    monkeypatch.setattr(kv_streaming, "PIECE_BYTES", 3 << 10)
    k = torch.zeros(2, 10, 1, 512)
    need = 3 * 5 * 2 * 2 * k.nbytes  # layers, slots, K and V, their gradients: no power of two divides an arena so
    for budget in (None, need):
        streams = SlotStreams(SimulatedStreams(), 5, budget, nullcontext, arena_bytes=1 << 16)
        for layer in range(3):
            streams.make(5, 10, True, layer)._allocate(k, k)
        assert streams.arenas.in_use == need
        assert streams.arenas.pinned < need + (1 << 16)


@pytest.mark.parametrize("room", [1.2, 1.3, 1.5])
def test_both_kinds_keep_within_one_budget(room: float) -> None:
    """Keys and values pin what they need, and leave the rest to units, whose arenas are not all full."""
    layout = case(n=4, m=2)
    memory = {"swap": 1.0, "kv_swap": "on"}
    need = plan_swaps(config_of(layout, memory=memory), make_plan(config_of(layout)), CPU).host_bytes(0)
    config = config_of(layout, memory=memory | {"host_budget_gib": room * need / GIB})
    session = Session(config, streams=SimulatedStreams())
    assert session.swaps is not None and session.slot_streams is not None
    assert session.slot_streams.arenas.pinned == session.planned.kv_bytes(0)
    assert need <= session.swaps.arenas.pinned + session.slot_streams.arenas.pinned <= room * need


def test_slots_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """That divide no row."""
    layout = case(n=4, m=2, micro_batch=2)
    expected = numbers(Session(config_of(layout)), layout)
    monkeypatch.setattr(kv_streaming, "PIECE_BYTES", 384)
    session = Session(with_keys(layout), streams=SimulatedStreams(order="late"))
    assert all(torch.equal(*pair) for pair in zip(numbers(session, layout), expected, strict=True))
    keys, kv = session.slot_streams, session.planned.kv
    assert keys is not None and kv is not None
    assert (keys.moved_out, keys.moved_in) == kv.moved(session.plan, 0, session.engine.slots)


def test_no_pinned_memory_to_be_had() -> None:
    message = r"memory\.kv_swap = on, rank 0: .* no pinned host memory beyond .*; set it to off, raise parallel\.pp"
    with pytest.raises(ValueError, match=message):
        Session(with_keys(case(n=4, m=2)), streams=SimulatedStreams(pinnable=1 << 12))


def test_less_host_memory_than_all_ranks_need(monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_keys(case(n=4, m=2))
    planned = plan_swaps(config, make_plan(config), CPU)
    monkeypatch.setattr("slimpipe.train.swapping.available", lambda: 3 << 30)
    device: Any = mock.Mock(type="cuda")
    with pinning_slots(config, planned, 0, device, lambda nbytes: 3 << 30):
        pass
    message = r"memory\.kv_swap = on, rank 0: .* 4\.0 GiB by all ranks .* 3\.0 GiB available"
    with pytest.raises(ValueError, match=message), pinning_slots(config, planned, 0, device, lambda nbytes: 4 << 30):
        pass


def test_host_budget_that_does_not_suffice() -> None:
    layout = case(n=4, m=2)
    config = config_of(layout, memory={"kv_swap": "on", "host_budget_gib": 1e-6})
    message = (
        r"memory\.host_budget_gib = 1e-06: rank 0 needs .* for memory\.kv_swap = on; raise it, or set .*kv_swap: off"
    )
    with pytest.raises(ConfigError, match=message):
        plan_swaps(config, make_plan(config), CPU)
    config = config_of(layout, memory={"swap": 0.5, "kv_swap": "on", "host_budget_gib": 1e-6})
    with pytest.raises(ConfigError, match=r"for memory\.swap = 0\.5 and memory\.kv_swap = on; raise it, or move less"):
        plan_swaps(config, make_plan(config), CPU)
