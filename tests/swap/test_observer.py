"""The three observers see the same operators, on whatever thread, and not the manager's own."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

from slimpipe.swap.observer import Observer, _cpp_available, make_observer
from slimpipe.swap.references import count_when_alone
from slimpipe.swap.signature import Signature, same_sequence


def observers() -> list[Observer]:
    kinds = ["dispatch", "hooks", *(["cpp"] if _cpp_available() else [])]
    return [make_observer(kind, lambda operator: None) for kind in kinds]  # type: ignore[arg-type]


def work(layers: int = 2, backward: bool = True, optimizer: bool = True, width: int = 8) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)))
    loss = model(torch.randn(4, width)).square().mean()
    if backward:
        loss.backward()
    if optimizer:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9).add_(0.1)


def signature(observer: Observer, **options: int | bool) -> Signature:
    with (
        observer.watching(),
        torch.autograd.graph.saved_tensors_hooks(
            lambda t: (observer.at_hook("save"), t.detach())[1], lambda t: (observer.at_hook("load"), t)[1]
        ),
    ):
        work(**options)  # type: ignore[arg-type]
    return Signature.of(observer.sequence(), 0)


@pytest.mark.parametrize("observer", observers(), ids=lambda o: o.name)
def test_segments(observer: Observer) -> None:
    whole, again = signature(observer), signature(observer)
    assert whole.forward.length > 0 and whole.backward.length > 0
    assert same_sequence(whole, again, 0.0, 1.0)
    assert same_sequence(whole, signature(observer, width=16), 0.0, 1.0)  # sizes are not operators
    assert not same_sequence(whole, signature(observer, layers=4), 0.05, 0.95)
    forward_only = signature(observer, backward=False, optimizer=False)
    assert forward_only.backward.length == 0 and not same_sequence(whole, forward_only, 0.05, 0.95)
    if observer.name != "hooks":
        skipped = signature(observer, optimizer=False)
        assert skipped.tail.length < whole.tail.length and same_sequence(whole, skipped, 0.05, 0.95)


@pytest.mark.parametrize("observer", observers(), ids=lambda o: o.name)
def test_own_operators_do_not_count(observer: Observer) -> None:
    with observer.watching():
        torch.ones(3) + 1
        before = len(observer.sequence())
        with observer.paused():
            torch.ones(3) + 1
            with observer.paused():
                pass
            torch.ones(3) + 1
        assert len(observer.sequence()) == before
        torch.ones(3) + 1
        assert len(observer.sequence()) > before or observer.name == "hooks"
    assert len(observer.sequence()) >= before


@pytest.mark.skipif(not _cpp_available(), reason="csrc/ is not built")
def test_cpp_counts_what_the_profiler_counts() -> None:
    """Independent: the raw events of torch.profiler (its table leaves out calls that only contain one like them)."""
    observer = make_observer("cpp", lambda operator: None)
    x = torch.randn(8, 8)

    @torch.no_grad()
    def forward() -> None:
        ((x @ x.t()).relu().softmax(-1) + nn.functional.layer_norm(x, (8,))).square().mean()

    forward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, observer.watching():
        forward()
        count = observer.at_hook("save")
    raw = (event.name() for event in profile.profiler.kineto_results.events())
    names = Counter(name for name in raw if name.startswith("aten::"))
    assert count == len(observer.sequence()) == names.total() > 10
    assert sorted(Counter((np.asarray(observer.sequence()) >> 1).tolist()).values()) == sorted(names.values())


@pytest.mark.skipif(not _cpp_available(), reason="csrc/ is not built")
def test_one_watch_at_a_time() -> None:
    one, two = (make_observer("cpp", lambda operator: None) for _ in range(2))
    with one.watching(), pytest.raises(RuntimeError, match="one at a time"), two.watching():
        pass
    with two.watching():
        torch.ones(1) + 1
    assert len(two.sequence()) > 0


def test_dispatch_acts_at_every_operator() -> None:
    seen: list[int] = []
    observer = make_observer("dispatch", seen.append)
    with observer.watching():
        torch.ones(3) + 1
    assert seen == list(range(1, len(observer.sequence()) + 1))


@pytest.mark.skipif(not _cpp_available(), reason="csrc/ is not built")
def test_pending_tensors_in_cpp() -> None:
    """The queue that the allocator's callback drains, without an allocator that calls back."""
    ops, alone = torch.ops.slimpipe, count_when_alone()

    def held(event: int = 0) -> int:
        tensor = torch.ones(4)
        tensor.add_(1)
        tensor.untyped_storage()
        return int(ops.hold_pending(tensor, event, alone))

    one, two, three = held(), held(), held(event=12345)
    assert torch.equal(ops.take_pending(one), torch.full((4,), 2.0)) and ops.take_pending(one) is None
    shared = torch.ones(4)
    shared.untyped_storage()
    four = ops.hold_pending(shared.detach(), 0, alone)
    # The third waits for an event, and no CUDA is here to wait; the fourth someone else still reads.
    assert ops.drain_pending() == 1
    assert ops.take_pending(two) is None
    assert (ops.drained_version(two), ops.drained_version(two)) == (1, -1)
    assert torch.equal(ops.take_pending(three), torch.full((4,), 2.0))
    assert torch.equal(ops.take_pending(four), shared)
