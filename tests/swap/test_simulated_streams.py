"""The simulated device punishes every wait that is left out: each mistake below gives wrong numbers or a fault.

So the equality of tests/swap/test_bitwise.py means something.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from slimpipe.swap import SimulatedStreams
from slimpipe.swap.simulated_streams import Copy
from tests.swap.programs import PROGRAMS
from tests.swap.support import differences, make_manager, run


def wrong(streams: SimulatedStreams, name: str = "plain") -> bool:
    manager = make_manager(0, streams, host_budget=1 << 18)
    expected = run(PROGRAMS[name], None)
    return bool(differences(run(PROGRAMS[name], manager), expected)) or bool(streams.faults)


def test_all_waits_in_place() -> None:
    assert not wrong(SimulatedStreams(order="random", rate=1e8))


class NeverWaitsForCopiesIn(SimulatedStreams):
    def wait(self, event: Copy) -> None:
        pass

    def wait_everywhere(self, event: Copy) -> None:
        super().wait(event)


class LetsGoAtOnce(SimulatedStreams):
    def wait_everywhere(self, event: Copy) -> None:
        pass


@pytest.mark.parametrize("order", ["late", "random"])
@pytest.mark.parametrize("mistake", [NeverWaitsForCopiesIn, LetsGoAtOnce])
def test_a_missing_wait_gives_wrong_numbers(mistake: type[SimulatedStreams], order: Any) -> None:
    assert any(wrong(mistake(order=order, seed=seed, rate=1e8)) for seed in range(3))


class Audit(SimulatedStreams):
    """Notes copies in that do not wait for the copy out of the same host memory.

    That wait follows from another as a rule (the compute stream waited before the tensor was let go), so its absence
    would not show in numbers. It must be there all the same.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.written_by: dict[int, Copy] = {}
        self.copies_in = self.unordered = 0

    def copy_out(self, source: Tensor, host: Tensor, after: Sequence[Copy]) -> Copy:
        self.written_by[host.data_ptr()] = event = super().copy_out(source, host, after)
        return event

    def copy_in(self, host: Tensor, target: Tensor, after: Sequence[Copy]) -> Copy:
        self.copies_in += 1
        self.unordered += self.written_by[host.data_ptr()] not in after
        return super().copy_in(host, target, after)


@pytest.mark.parametrize("name", ["exceptions", "retained_graph", "plain"])
def test_a_copy_in_waits_for_its_own_copy_out(name: str) -> None:
    streams = Audit(order="random", rate=1e8)
    run(PROGRAMS[name], make_manager(0, streams, host_budget=1 << 17))
    assert streams.copies_in > 0 and streams.unordered == 0


@pytest.mark.parametrize("order", ["late", "random", "early"])
def test_copies_and_their_order(order: Any) -> None:
    streams = SimulatedStreams(order=order)
    source, host, target = torch.arange(9).byte(), streams.host_memory(9), streams.empty(9)
    out = streams.copy_out(source, host, [])
    back = streams.copy_in(host, target, [out])
    if order == "late":
        assert (host == 0xFF).all() and (target == 0xFF).all() and not streams.done(back)
    streams.wait(back)
    assert torch.equal(target, source) and streams.under_way() == 0 and streams.done(out)


def test_memory_given_up_counts_no_more_and_reads_as_poison() -> None:
    streams = SimulatedStreams()
    tensor, host = torch.ones(8, dtype=torch.uint8), streams.host_memory(8)
    streams.watch(tensor.untyped_storage())
    assert streams.memory_in_use() == 8
    event = streams.copy_out(tensor, host, [])
    assert streams.memory_in_use() == 8
    del tensor
    assert streams.memory_in_use() == 0
    streams.wait(event)
    assert (host == 0xFF).all() and len(streams.faults) == 1


def test_a_copy_into_memory_given_up_is_a_fault() -> None:
    streams = SimulatedStreams()
    target = streams.empty(8)
    event = streams.copy_in(streams.host_memory(8), target, [])
    del target
    streams.wait(event)
    assert len(streams.faults) == 1


def test_the_clock_goes_by_operators_bytes_and_waits() -> None:
    streams = SimulatedStreams(rate=1e3, seconds_per_operator=0.5)
    source = torch.zeros(1000, dtype=torch.uint8)
    host = streams.host_memory(2000)
    streams.at_operator(2)
    first = streams.copy_out(source, host[:1000], [])
    second = streams.copy_out(source, host[1000:], [])
    assert (first.end, second.end) == (2.0, 3.0)
    streams.at_operator(3)
    streams.wait(second)
    assert streams.clock == 3.0 and streams.stalled == 1.5
    streams.at_operator(1)  # a new step
    assert streams.clock == 3.5


def test_a_full_device() -> None:
    streams = SimulatedStreams(capacity=100)
    kept = streams.empty(80)
    with pytest.raises(torch.OutOfMemoryError):
        streams.empty(40)
    del kept
    streams.empty(40)
