"""`UnitSwaps` by itself: what is called out of order, left out or short of room costs memory or time, and nothing else.
`available` reads what the system says."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from slimpipe.swap import SimulatedStreams, UnitSwaps
from slimpipe.swap.arena import PinnedArenas
from slimpipe.swap.host_memory import available


def make(
    streams: SimulatedStreams | None = None, host: int | None = None, modules: tuple[nn.Module, ...] = ()
) -> UnitSwaps:
    return UnitSwaps(streams or SimulatedStreams(), modules, (), 64, host, lambda inward: nullcontext(), 1 << 16)


def program(swaps: UnitSwaps | None, between: Callable[[UnitSwaps], None] = lambda swaps: None) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.Tanh())
    data = [torch.randn(8, 32) for _ in range(3)]
    if swaps is not None:
        swaps.excluded.add_module(model)
        swaps.begin(*data)
    losses = []
    for unit, x in enumerate(data):
        with nullcontext() if swaps is None else swaps.saving(unit):
            losses.append(model(x).square().mean())
    if swaps is not None:
        between(swaps)
    for loss in reversed(losses):
        loss.backward()
    if swaps is not None:
        swaps.end()
    return [*losses, *(p.grad for p in model.parameters() if p.grad is not None)]


def all_of(swaps: UnitSwaps, *calls: str) -> None:
    for call in calls:
        for unit in range(3):
            getattr(swaps, call)(unit)


@pytest.mark.parametrize(
    "calls",
    [(), ("offload",), ("offload", "vacate"), ("offload", "vacate", "reload"), ("vacate", "reload"), ("reload",)],
)
def test_whatever_is_left_out_the_numbers_are_the_same(calls: tuple[str, ...]) -> None:
    streams = SimulatedStreams()
    swaps = make(streams)
    found, expected = program(swaps, lambda swaps: all_of(swaps, *calls)), program(None)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert streams.faults == []
    assert (swaps.moved_out > 0) == (calls[:1] == ("offload",))
    assert swaps.arenas.in_use == swaps.live() == swaps.away_bytes == 0


def test_what_finds_no_room_on_the_host_stays() -> None:
    swaps = make(SimulatedStreams(pinnable=0))
    found, expected = program(swaps, lambda swaps: all_of(swaps, "offload", "vacate", "reload")), program(None)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert swaps.kept > 0 and swaps.moved_out == swaps.moved_in == 0


def test_pinning_beforehand() -> None:
    swaps = make()
    assert swaps.pin([(1 << 12, 0, 4), (1 << 12, 1, 3), (1 << 12, 5, 6)]) is None
    assert (swaps.arenas.pinned, swaps.arenas.in_use, swaps.arenas.peak) == (1 << 16, 0, 512)
    small = make(host=1 << 12)
    assert small.pin([(1 << 12, 0, 2), (1 << 12, 1, 3)]) == (
        "4,096 bytes found no place in pinned host memory: at most 4,096 bytes may be pinned"
    )
    assert "no pinned host memory beyond 0 bytes" in str(make(SimulatedStreams(pinnable=0)).pin([(64, 0, 1)]))


def test_a_slot_carries_each_event_once() -> None:
    """However often its parts are taken and come together again, of events that are not over."""
    arenas = PinnedArenas(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), lambda event: False, 1 << 16, 1 << 12)
    events = [object() for _ in range(3)]
    for event in events * 10:
        slots = [arenas.take(1 << 10) for _ in range(4)]
        for slot in slots:
            assert slot is not None
            arenas.give(slot, [event])
    (block,) = arenas._free[0]
    assert sorted(map(id, block.after)) == sorted(map(id, events))


def test_memory_that_the_system_says_is_there(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    assert available(meminfo, tmp_path) is None
    meminfo.write_text("MemTotal:  100 kB\nMemAvailable:    64 kB\n")
    assert available(meminfo, tmp_path) == 65536
    for name, text in (
        ("memory.max", "50000"),
        ("memory.current", "40000"),
        ("memory.stat", "anon 1\ninactive_file 500\n"),
    ):
        (tmp_path / name).write_text(text)
    assert available(meminfo, tmp_path) == 10500
    (tmp_path / "memory.max").write_text("max\n")
    assert available(meminfo, tmp_path) == 65536
