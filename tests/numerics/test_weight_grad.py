"""`train.weight_grad_slices`: the same gradients from fewer, larger GEMMs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from slimpipe.kernels import weight_grad
from slimpipe.kernels.weight_grad import waiting_of
from slimpipe.plan.footprint import Footprints
from slimpipe.schedule import Op
from slimpipe.train.session import Session
from tests.numerics.harness import RankReport, batch_of, case, config_of, discrepancies, report, roughen
from tests.support.cover import Case
from tests.support.pool import Pool

LAYOUTS = [
    (case(n=4, m=2, qk_norm=True), 3),  # 8 backwards: two waves and a rest
    (case(pp=2, n=4, m=2, v=2, tied=True, recompute="mlp"), 4),
    (case(pp=2, n=4, m=1, recompute="full", vocab_parallel=True), 16),  # more than there are
    (case(pp=3, n=8, m=2, exchange="balanced", granule=2, recompute="all_but_attention"), 2),
]


def run(rank: int, world: int, case: Case, slices: int, mistake: str | None = None) -> tuple[RankReport, int]:
    """(report, GEMMs that added weight gradients of layers in one step)."""
    calls: Counter[tuple[int, ...]] = Counter()
    add = weight_grad.add_matmul

    def counting(acc: Tensor, a: Tensor, b: Tensor) -> None:
        calls[a.shape[1], b.shape[1]] += 1
        add(acc, a, b)

    with (
        mock.patch.object(weight_grad, "add_matmul", counting),
        mock.patch.object(weight_grad.Waiting, mistake, lambda *_: None) if mistake else mock.MagicMock(),
    ):
        session = Session(config_of(case, train={"weight_grad_slices": slices}))
        roughen(session.weights())
        session.step_gradients(*batch_of(case))
        calls.clear()
        found = report(session, session.step_gradients(*batch_of(case)))
    return found, calls.total()


@pytest.mark.parametrize(("case", "slices"), LAYOUTS, ids=str)
def test_gradients_are_the_plain_processes(case: Case, slices: int, pool: Callable[[int], Pool]) -> None:
    found = pool(case.pp).run(run, case, slices)
    assert discrepancies(case, [ranks for ranks, _ in found]) == []
    layers = case.layer_count // (case.pp * case.v)
    for _, gemms in found:
        assert gemms == case.v * layers * 4 * -(-case.m * case.n // slices)


def shapes_in_turn(rank: int, world: int, case: Case, slices: int) -> tuple[set[Any], set[Any]]:
    """Of the GEMMs that add gradients of layers: in the warm-up, in a step after it."""
    warm: set[Any] = set()
    later: set[Any] = set()
    now, add = warm, weight_grad.add_matmul

    def noted(acc: Tensor, a: Tensor, b: Tensor) -> None:
        now.add((acc.dtype, a.dtype, a.shape, b.shape))
        add(acc, a, b)

    with mock.patch.object(weight_grad, "add_matmul", noted):
        session = Session(config_of(case, train={"weight_grad_slices": slices}))
        now = later
        session.step_gradients(*batch_of(case))
    return warm, later


@pytest.mark.parametrize(("case", "slices"), [*LAYOUTS, (case(n=2, m=3), 4)], ids=str)
def test_no_step_joins_what_the_warm_up_has_not(case: Case, slices: int, pool: Callable[[int], Pool]) -> None:
    """Kernels are chosen by shapes, and what is new is loaded behind posted receives."""
    for warm, later in pool(case.pp).run(shapes_in_turn, case, slices):
        assert later <= warm and len({a for _, _, a, _ in later}) > 1


@pytest.mark.parametrize("mistake", ["flush", "add"])
def test_the_comparison_sees_a_deliberate_mistake(mistake: str, pool: Callable[[int], Pool]) -> None:
    layout, slices = LAYOUTS[0]
    assert discrepancies(layout, [ranks for ranks, _ in pool(1).run(run, layout, slices, mistake)]) != []


def test_a_step_that_failed_leaves_nothing_behind() -> None:
    """What waited when it failed is not added to the next step's."""
    layout = case(n=4, m=2)
    config = config_of(layout, train={"weight_grad_slices": 3})
    session = Session(config)
    expected = report(session, session.step_gradients(*batch_of(layout)))
    backward, calls = session.engine.methods, []

    def fails_at_the_third(action: Any) -> None:
        calls.append(action)
        if len(calls) == 3:
            raise RuntimeError("a kernel failed")
        session.engine.backward(action)

    session.engine.methods = {**backward, Op.BACKWARD: fails_at_the_third}
    with pytest.raises(RuntimeError, match="a kernel failed"):
        session.step_gradients(*batch_of(layout))
    session.engine.methods = backward
    again = report(session, session.step_gradients(*batch_of(layout)))
    assert all(torch.equal(again.gradients[name], expected.gradients[name]) for name in expected.gradients)


@pytest.mark.parametrize("slices", [1, 2, 3, 8])
@pytest.mark.parametrize("inner", [48, 200])
def test_what_waits_is_predicted(slices: int, inner: int) -> None:
    """To the byte: the most that wait at once, and of one GEMM the joined ones. The pair that has come last is a part
    of the backward's working set; what a step's end joins has the room of activations."""
    layout = case(n=4, m=1)
    config = config_of(layout, train={"weight_grad_slices": slices}, model={"intermediate_size": inner})
    session = Session(config)
    most = 0

    def size(tensors: Iterable[Tensor]) -> int:
        return sum(x.numel() * x.element_size() for x in tensors)

    def looking(acc: Tensor, a: Tensor, b: Tensor) -> None:
        nonlocal most
        waiting = [waiting_of(acc) for acc in session.gradient_buffer.views().values()]
        pairs = [pair for one in waiting if one is not None for pair in one._pairs]
        flushed, joined = waiting_of(acc), 0
        if flushed is not None and torch._C._current_autograd_node() is not None:
            joined = size((a, b)) - size(flushed._pairs[-1])
        most = max(most, size(x for pair in pairs for x in pair) + joined)
        add_matmul(acc, a, b)

    add_matmul = weight_grad.add_matmul
    with mock.patch.object(weight_grad, "add_matmul", looking):
        session.step_gradients(*batch_of(layout))
    footprints = Footprints(
        config, session.plan, session.planned.peaks, None, session.placement, [0], session.ce_chunk, 2, False
    )
    assert most == footprints.ranks[0].terms["waiting factors"]
    assert (most > 0) == (slices > 1)
