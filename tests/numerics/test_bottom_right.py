"""A backend that takes a slice and the past in front of it in one call: the plain process's gradients, and which calls.

The backend is slimpipe's own for flash-attn 4, on a stand-in for the package that computes in plain PyTorch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from slimpipe.kernels.attention.flash_package import PackagedFlashAttention
from slimpipe.runtime import sliced_attention as attention_module
from slimpipe.runtime.kv_slots import LayerSlots
from slimpipe.schedule import Op
from slimpipe.train import forecast as forecast_module
from slimpipe.train import session as session_module
from slimpipe.train.forecast import Forecast
from slimpipe.train.planning import make_plan
from slimpipe.train.session import Session
from tests.numerics.harness import RankReport, batch_of, case, config_of, discrepancies, report, roughen
from tests.support.cover import Case
from tests.support.fake_flash import Call, package
from tests.support.pool import Pool

CASES = [
    case(n=4, m=2, mask="ragged", micro_batch=2),
    case(pp=2, n=4, m=3, v=2, tied=True, recompute="all_but_attention"),
    case(pp=3, n=8, m=2, recompute="full", vocab_parallel=True),
    case(pp=4, n=4, m=4, kv="mha"),  # n < 2p: pasts of two ranges
    case(pp=3, n=8, m=3, exchange="balanced", granule=2),
    case(pp=3, n=8, m=2, exchange="balanced", granule=2, recompute="full", keep="kv"),
]


def run(rank: int, world: int, case: Case, mistake: str | None = None) -> tuple[RankReport, Counter[Call], Any]:
    """(report, calls of a step, those that the plan implies)."""
    calls: list[Call] = []
    backend = PackagedFlashAttention("flash4", package("flash4", calls))
    with (
        mock.patch.object(session_module, "choose_attention", lambda *_: (backend, None)),
        mock.patch.object(*MISTAKES[mistake]) if mistake else mock.MagicMock(),
    ):
        session = Session(config_of(case))
        roughen(session.weights())
        calls.clear()  # the warm-up's
        found = report(session, session.step_gradients(*batch_of(case)))
    return found, Counter(calls), expected_calls(session)


def expected_calls(session: Session) -> Counter[Call]:
    """Of a rank's step: a unit's own slice with the past that ends where it begins, unless the rank also helps in the
    slot; each other range of its past; and what it computes for others."""
    s, engine, exchange = session.slice_tokens, session.engine, session.exchange
    full = session.config.memory.recompute == "full"
    calls: Counter[Call] = Counter()
    for action in engine.actions:
        kinds = ["F"] if action.op in (Op.FORWARD, Op.HELP_FORWARD) else ["F", "B"] if full else ["B"]
        helped = [] if exchange is None else [loan.tokens for loan in exchange.helped_in(engine.rank, action)]
        blocks = [(tokens, False) for tokens in helped]
        if action.op.is_compute:
            ranges, _ = engine.past_ranges(action)
            own = s * engine.slots.places[action.unit].slot
            beside = [stop - start for start, stop in ranges if stop == own and not helped]
            blocks += [(s + sum(beside), True)]
            blocks += [(stop - start, False) for start, stop in ranges if stop != own or helped]
        elif not action.op.is_help:
            continue
        chunk = session.stages[action.unit.chunk if action.op.is_compute else 0]
        for kind in kinds:
            for tokens, causal in blocks:
                calls[Call(kind, s, tokens, causal)] += len(chunk.layers)
    return calls


def forecast_blocks(case: Case) -> list[tuple[int, int]]:
    """By rank: keys of the longest block of others, and of a slice and its past, of which memory is forecast."""
    settings = {"dtype": "bfloat16", "device": "cuda", "attention": "flash4"}
    config, found = config_of(case, train=settings), []
    with mock.patch.object(forecast_module, "scratch_bytes", lambda *given: found.append((given[2], given[-1])) or 0):
        assert Forecast(config, make_plan(config), torch.device("cpu")).memory
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_the_plain_processes_and_calls_as_few_as_they_can_be(
    case: Case, pool: Callable[[int], Pool]
) -> None:
    ranks = pool(case.pp).run(run, case)
    assert discrepancies(case, [found for found, _, _ in ranks]) == []
    for (_, calls, expected), (others, joined) in zip(ranks, forecast_blocks(case), strict=True):
        assert calls == expected
        own, other = (max(call.t for call in calls if call.kind == "B" and call.causal == causal) for causal in (1, 0))
        # Loans may be cut out of a past's middle: its parts are counted as one.
        assert own == joined if case.exchange == "off" else own <= joined
        assert other <= max(others, joined)
    one, two = (
        sum(n for _, calls, _ in ranks for call, n in calls.items() if call.causal and (call.t > call.s) == joined)
        for joined in (True, False)
    )
    assert one > 0 and two > 0


def test_by_hand(pool: Callable[[int], Pool]) -> None:
    """One rank, four slices of 16. Even microbatches grow from the left: one call a slice. Odd ones from the right: the
    past lies behind the slice, and takes a call of its own."""
    layout = case(n=4, m=2)
    ((_, calls, _),) = pool(1).run(run, layout)
    per_layer = {call: n / layout.layer_count for call, n in calls.items()}
    even = {Call(kind, 16, 16 * (i + 1), True): 1 for kind in "FB" for i in range(4)}
    odd = {Call(kind, 16, 16 * i, False): 1 for kind in "FB" for i in range(1, 4)}
    own = {Call(kind, 16, 16, True): 1 + 4 for kind in "FB"}
    assert per_layer == even | odd | own


def test_a_rank_that_lends_nothing_and_helps_nobody_joins_too(pool: Callable[[int], Pool]) -> None:
    layout = case(pp=3, n=8, m=1, recompute="norms")
    loans = replace(layout, exchange="balanced", granule=2)
    off, on = (sum(sum(calls.values()) for _, calls, _ in pool(3).run(run, one)) for one in (layout, loans))
    assert off < on


def _forgets_the_past(self: Any, exchange: Any) -> Any:
    own, pasts = _BLOCKS(self, exchange)
    return self.slots.positions(self.place.slot, self.place.slot + 1), pasts


def _takes_it_twice(self: Any, exchange: Any) -> Any:
    return _BLOCKS(self, exchange)[0], self._own_ranges(exchange)


def _adds_the_slices_own_too(self: Any, start: int, stop: int, dk: Any, dv: Any, first: bool) -> None:
    _ADD(self, start, stop, dk.flip(1), dv.flip(1), first)


_BLOCKS, _ADD = attention_module.LayerAttention._blocks, LayerSlots.add_gradient
MISTAKES: dict[str, tuple[Any, str, Any]] = {
    "the past beside the slice is forgotten": (attention_module.LayerAttention, "_blocks", _forgets_the_past),
    "it is attended to twice": (attention_module.LayerAttention, "_blocks", _takes_it_twice),
    "its gradients go to the wrong tokens": (LayerSlots, "add_gradient", _adds_the_slices_own_too),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_comparison_sees_a_deliberate_mistake(name: str, pool: Callable[[int], Pool]) -> None:
    layout = case(pp=2, n=4, m=2)
    assert discrepancies(layout, [found for found, _, _ in pool(2).run(run, layout, name)]) != []
