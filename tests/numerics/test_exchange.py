"""Attention context exchange: the same loss and gradients as without, whoever computes what, however late it comes."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from slimpipe.kernels.attention import PlainAttention
from slimpipe.runtime import exchange as exchange_module
from slimpipe.runtime import sliced_attention as attention_module
from slimpipe.runtime.exchange import DistributedExchange
from slimpipe.train.planning import make_plan
from slimpipe.train.session import Session
from tests.numerics.harness import RankReport, batch_of, case, config_of, discrepancies, report, roughen, run_case
from tests.numerics.in_order import in_threads
from tests.support.cover import Case
from tests.support.pool import Pool
from tests.support.reference import relative_error


def _cases() -> list[tuple[Case, int]]:
    """(case, least number of loans): with fewer a test would prove little. n = 8 slices of 8 tokens, granule 2.

    Crossed: p, v, m and the mode. m = 1 has no other microbatch to lend to; with m = 3 a first, a middle and a last one
    run beside each other: m = 2 would add nothing. The options are drawn so that nearly all pairs of values occur.
    """
    cases = []
    for pp, v, m, mode in itertools.product((2, 3, 4), (1, 2), (1, 3), MODES):
        several, balanced = m == 3, mode == "balanced"
        options: dict[str, Any] = {
            "kv": "gqa" if (pp + several + balanced) % 2 else "mha",
            "mask": "ragged" if v == 2 else "none",
            "recompute": MODES_OF_MEMORY[(pp + 2 * v + several + 3 * balanced) % 5],
            "micro_batch": 1 if several else 2,
            "vocab_parallel": (pp + v + several) % 2 == 1,
            "keep": "kv" if (v + several) % 2 else "none",
            "tied": several,
        }
        cases.append((case(pp=pp, v=v, n=8, m=m, exchange=mode, granule=2, **options), LEAST[mode, pp] * m * v))
    return cases


MODES = ("pairwise", "balanced")
MODES_OF_MEMORY = ("none", "norms", "mlp", "all_but_attention", "full")
# What pairs of whole slices can lend at two ranks is next to nothing.
LEAST = {("pairwise", 2): 0, ("pairwise", 3): 2, ("pairwise", 4): 4}
LEAST |= {("balanced", 2): 8, ("balanced", 3): 12, ("balanced", 4): 16}
CASES = _cases()


@pytest.mark.parametrize(("case", "least"), CASES, ids=str)
def test_loss_and_every_gradient_equal_the_plain_process(
    case: Case, least: int, reports: Callable[[Case], list[RankReport]]
) -> None:
    exchange = make_plan(config_of(case)).exchange
    assert exchange is not None and len(exchange.loans) >= least, f"{len(exchange.loans)} loans"
    assert discrepancies(case, reports(case)) == []


DELAYED = [
    case(pp=3, n=8, m=2, exchange="balanced", granule=2, vocab_parallel=True, mask="ragged"),
    case(pp=4, v=2, n=8, m=2, exchange="balanced", granule=4, keep="kv"),
    case(pp=4, n=8, m=2, exchange="pairwise"),
    case(pp=3, n=8, m=2, exchange="balanced", granule=2, recompute="full", keep="kv"),
]


@pytest.mark.parametrize("case", DELAYED, ids=str)
def test_delays_change_nothing(case: Case, pool: Callable[[int], Pool]) -> None:
    """Every batch of transfers and every helper waits for a random while: the same bits, and no hang."""
    for delayed, plain in zip(pool(case.pp).run(with_delays, case), run_case(pool, case), strict=True):
        assert delayed.loss == plain.loss
        assert all(torch.equal(delayed.gradients[name], plain.gradients[name]) for name in plain.gradients)


def with_delays(rank: int, world: int, case: Case) -> RankReport:
    chance = random.Random(rank)
    post, help_forward = DistributedExchange.post, exchange_module._ForwardUnderWay.help
    help_backward = exchange_module._BackwardUnderWay.help

    def late(function: Callable[..., Any]) -> Callable[..., Any]:
        def delayed(*arguments: Any) -> Any:
            time.sleep(chance.choice((0, 0, 0, 0.002, 0.005)))
            return function(*arguments)

        return delayed

    with (
        mock.patch.object(DistributedExchange, "post", late(post)),
        mock.patch.object(exchange_module._ForwardUnderWay, "help", late(help_forward)),
        mock.patch.object(exchange_module._BackwardUnderWay, "help", late(help_backward)),
    ):
        session = Session(config_of(case))
        roughen(session.weights())
        return report(session, session.step_gradients(*batch_of(case)))


@pytest.mark.parametrize("case", [case for case, _ in CASES[1::4]], ids=str)
def test_the_in_order_transport_gives_the_same(
    case: Case, pool: Callable[[int], Pool], reports: Callable[[Case], list[RankReport]]
) -> None:
    """To the bit, but for gloo's order of adding where the vocabulary's reduces have more than two parts."""
    (threads,) = pool(1).run(in_threads, case)
    tied = case.tied and not case.vocab_parallel
    if tied:
        first, last = (threads[rank].gradients for rank in (0, -1))
        first["embedding.weight"] = last["embedding.weight"] = first["embedding.weight"] + last["embedding.weight"]
    for ours, theirs in zip(threads, reports(case), strict=True):
        bound = 1e-5 if case.vocab_parallel and case.pp > 2 else 0.0
        assert all(relative_error(ours.gradients[n], theirs.gradients[n]) <= bound for n in theirs.gradients)


def test_helpers_serve_an_evaluation_too(pool: Callable[[int], Pool]) -> None:
    layout = case(pp=3, n=8, m=2, exchange="balanced", granule=2, keep="kv")
    alone = replace(layout, exchange="off", keep="none", granule=None)
    for lent, plain in zip(pool(3).run(evaluate, layout), pool(3).run(evaluate, alone), strict=True):
        torch.testing.assert_close(lent, plain, rtol=1e-5, atol=1e-6)


def evaluate(rank: int, world: int, case: Case) -> Tensor:
    session = Session(config_of(case))
    losses = session.token_losses(*batch_of(replace(case, exchange="off", keep="none", granule=None)))
    session.step_gradients(*batch_of(case))
    return losses


@pytest.mark.parametrize("layout", [case(n=8, m=2), case(pp=2, n=1, m=2), case(pp=3, n=1, m=1)], ids=str)
def test_with_one_rank_or_one_slice_there_is_nothing_to_lend(layout: Case, pool: Callable[[int], Pool]) -> None:
    layout = replace(layout, exchange="balanced")
    exchange = make_plan(config_of(layout)).exchange
    assert exchange is None or exchange.loans == ()
    assert discrepancies(layout, run_case(pool, layout)) == []


@pytest.mark.parametrize("mode", MODES_OF_MEMORY)
def test_every_token_of_a_past_is_attended_to_once_and_twice_in_full(mode: str, pool: Callable[[int], Pool]) -> None:
    """Over all ranks, lent ranges and kept ones: m sequences of n slices of 8 tokens, a layer."""
    layout = case(pp=3, n=8, m=2, exchange="balanced", granule=2, recompute=mode, keep="kv")
    found = sum(pool(3).run(tokens_attended_to, layout))
    assert found == (2 if mode == "full" else 1) * layout.layer_count * layout.m * sum(8 * i for i in range(8))


def tokens_attended_to(rank: int, world: int, case: Case) -> int:
    session, tokens = Session(config_of(case)), []
    forward = PlainAttention.forward

    def counting(self: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Any:
        tokens.append(0 if causal else k.shape[1])
        return forward(self, q, k, v, causal)

    with mock.patch.object(PlainAttention, "forward", counting):
        session.step_gradients(*batch_of(case))
    return sum(tokens)


def _lent_part_is_lost(self: Any) -> list[Any]:
    return _FORWARD(self)[:-1]


def _lent_part_comes_twice(self: Any) -> list[Any]:
    return [part for part in _FORWARD(self) for _ in range(2)]


def _gradient_of_a_lent_part_is_lost(self: Any) -> list[Any]:
    return _BACKWARD(self)[:-1]


_FORWARD, _BACKWARD = exchange_module._ForwardUnderWay.collect, exchange_module._BackwardUnderWay.collect


def _helpers_keep_no_query(self: Any, owned: Any) -> Any:
    self._queries = [torch.zeros_like(query) for query in self._queries]
    return _SECOND_ROUND(self, owned)


_SECOND_ROUND = exchange_module.LayerExchange.backward


def _lent_part_is_computed_here_too(ranges: Sequence[Any], lent: Sequence[Any]) -> list[Any]:
    return list(ranges)


MISTAKES: dict[str, tuple[Any, str, Any]] = {
    "a lent part is lost": (exchange_module._ForwardUnderWay, "collect", _lent_part_is_lost),
    "a lent part comes twice": (exchange_module._ForwardUnderWay, "collect", _lent_part_comes_twice),
    "a lent part's gradient is lost": (exchange_module._BackwardUnderWay, "collect", _gradient_of_a_lent_part_is_lost),
    "a lent part is computed here too": (attention_module, "without", _lent_part_is_computed_here_too),
    "helpers keep no query in full": (exchange_module.LayerExchange, "backward", _helpers_keep_no_query),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_comparison_sees_a_deliberate_mistake(name: str, pool: Callable[[int], Pool]) -> None:
    mode = "full" if name.endswith("full") else "none"
    layout = case(pp=3, n=8, m=2, exchange="balanced", granule=2, recompute=mode)
    assert discrepancies(layout, pool(3).run(mistaken, layout, name)) != []


def mistaken(rank: int, world: int, case: Case, name: str) -> RankReport:
    with mock.patch.object(*MISTAKES[name]):
        session = Session(config_of(case))
        roughen(session.weights())
        return report(session, session.step_gradients(*batch_of(case)))
