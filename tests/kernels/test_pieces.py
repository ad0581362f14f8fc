"""Attention's backward over many keys in pieces: the same gradients, no call over too many keys, and the bytes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from slimpipe.kernels.attention import pieces
from slimpipe.kernels.attention.pieces import InPieces, bytes_per_key, most_keys, scratch_bytes
from slimpipe.train import session as session_module
from slimpipe.train.forecast import Forecast
from slimpipe.train.planning import make_plan
from slimpipe.train.session import Session
from tests.numerics.harness import RankReport, batch_of, case, config_of, discrepancies, report, roughen
from tests.support.cover import Case
from tests.support.fake_flash import BottomRight
from tests.support.pool import Pool

LLAMA_8B = {"heads": 32, "kv_heads": 8, "width": 128}


class Counted(BottomRight):
    """Of cuDNN's name and memory, in plain PyTorch; (queries, keys, causal) of each backward."""

    name = "cudnn"
    bottom_right = True

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, bool]] = []

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.calls.append((q.shape[1], k.shape[1], causal))
        return super().backward(dout, q, k, v, out, lse, causal=causal)


def few_keys(number: int, width: int = 8, heads: int = 4, element: int = 8) -> Any:
    """Patches the bound to so many keys a call."""
    return mock.patch.multiple(pieces, STEP=1, MOST_BYTES=number * 2 * width * heads * element)


@pytest.mark.parametrize(
    ("keys", "causal", "calls"),
    [
        (5, False, [(5, False)]),
        (6, False, [(6, False)]),
        (7, False, [(6, False), (1, False)]),
        (20, False, [(6, False), (6, False), (6, False), (2, False)]),
        # The queries' own four keys are in the last piece, with as many before them as fit.
        (6, True, [(6, True)]),
        (20, True, [(6, False), (6, False), (2, False), (6, True)]),
    ],
)
def test_pieces_give_the_whole_gradients(keys: int, causal: bool, calls: list[tuple[int, bool]]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(2, 4, 4, 8, dtype=torch.float64, generator=generator) for _ in range(2))
    buffer = torch.randn(2, 2 * keys + 3, 2, 8, dtype=torch.float64, generator=generator)
    k, v = buffer[:, 3 : 3 + keys], buffer[:, 3 + keys :]
    backend = Counted()
    out, lse = backend.forward(q, k, v, causal=causal)
    whole = BottomRight().backward(dout, q, k, v, out, lse, causal=causal)
    with few_keys(12):  # of one sequence: 6 of two
        found = InPieces(backend).backward(dout, q, k, v, out, lse, causal)
    assert backend.calls == [(4, length, last) for length, last in calls]
    for ours, expected in zip(found, whole, strict=True):
        assert ours.dtype == expected.dtype and ours.shape == expected.shape
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("keys", "queries", "most"), [(1, 1, 1), (70, 64, 32), (200, 10, 64), (128, 64, 64), (9, 3, 2)]
)
def test_ranges_cover_all_keys_once(keys: int, queries: int, most: int, causal: bool) -> None:
    ranges = list(pieces.pieces(keys, queries, most, causal))
    assert ranges[0][0] == 0 and ranges[-1][1] == keys
    assert all(one[1] == other[0] for one, other in pairwise(ranges))
    assert all(0 < stop - start <= most for start, stop in (ranges[:-1] if causal else ranges))
    if causal:
        assert ranges[-1][1] - ranges[-1][0] == max(queries, most)


def test_a_kernels_bytes() -> None:
    """cuDNN asked for 4.19 GiB on an H200 (benchmarks/results/pipeline.jsonl, 512k-n64-full): 8192 queries, and the
    266,240 keys of the last slice's past that rank 1 did not lend."""
    whole = bytes_per_key("cudnn", 32, 8, 128, 2) * 266_240 + 4 * 8192 * 32 * 128
    assert f"{whole / 2**30:.2f}" == "4.19"
    assert most_keys(16384) == 65536
    # In pieces of 64K keys: dK and dV of one are 256 MiB, and dQ is summed beside the kernel's own.
    assert scratch_bytes("cudnn", 8192, 266_240, **LLAMA_8B) == 2**30 + 2**28 + 2 * (4 * 8192 * 4096)
    assert scratch_bytes("cudnn", 8192, 10240, **LLAMA_8B) == 16384 * 10240 + 4 * 8192 * 4096
    assert scratch_bytes("flash4", 8192, 10240, **LLAMA_8B) == 8192 * 10240 + 4 * 8192 * 4096
    # One key head a query head: the gradients come as they are.
    assert bytes_per_key("cudnn", 32, 32, 128, 2) == 0 and most_keys(0) is None
    assert scratch_bytes("cudnn", 8192, 266_240, 32, 32, 128) == 4 * 8192 * 4096
    assert scratch_bytes("plain", 8192, 266_240, **LLAMA_8B) == 0
    # The queries' own keys are one call, however many: 2 GiB of a sequence of 128K that is not cut.
    assert scratch_bytes("cudnn", 131072, 0, **LLAMA_8B) == 16384 * 131072 + 4 * 131072 * 4096
    assert scratch_bytes("cudnn", 8192, 8192, **LLAMA_8B, batch=8) == 8 * (16384 * 8192 + 4 * 8192 * 4096)
    # A past of two slices in front of a third: 64 MiB more in one block than apart.
    apart = scratch_bytes("flash4", 8192, 16384, **LLAMA_8B)
    assert scratch_bytes("flash4", 8192, 0, **LLAMA_8B, joined=24576) == apart + 2**26
    # FlashAttention-2 adds dQ up in ceil(132 / 32) parts where it must be deterministic.
    kept = scratch_bytes("flash", 8192, 8192, **LLAMA_8B)
    assert scratch_bytes("flash", 8192, 8192, **LLAMA_8B, deterministic=True) == kept + 4 * (4 * 8192 * 4096)
    assert scratch_bytes("flash", 8192, 8192, **LLAMA_8B, batch=8, deterministic=True) == 8 * kept


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(4, 20), (20, 0), (12, 30), (40, 30), (4, 9), (11, 11), (4, 6)])
def test_what_is_said_of_a_backward_is_what_its_calls_take(queries: int, keys: int, joined: bool) -> None:
    """`joined`: the keys lie in front of the queries' own, in one block with them."""
    backend, width, heads = Counted(), 8, 4
    by_query_head, results, dq = 2 * width * heads * 8, 2 * width * 2 * 8, 4 * queries * heads * width
    q, taken = torch.zeros(1, queries, heads, width, dtype=torch.float64), []
    with few_keys(10):
        for length, causal in ((queries + keys, True),) if joined else ((queries, True), (keys, False)):
            k = torch.zeros(1, length, 2, width, dtype=torch.float64)
            backend.calls.clear()
            InPieces(backend).backward(q, q, k, k, *backend.forward(q, k, k, causal=causal), causal)
            cut = len(backend.calls) > 1
            taken += [called * (by_query_head + cut * results) + cut * dq for _, called, _ in backend.calls]
        past = {"keys": 0, "joined": queries + keys} if joined else {"keys": keys}
        found = scratch_bytes("cudnn", queries, heads=heads, kv_heads=2, width=width, element=8, **past)
    assert found == dq + max(taken)


def test_a_pieces_results_are_gone_before_the_next_are_made() -> None:
    class Watched(Counted):
        def __init__(self) -> None:
            super().__init__()
            self.given: list[weakref.ref[Tensor]] = []
            self.alive: list[int] = []

        def backward(self, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
            self.alive.append(sum(one() is not None for one in self.given))
            found = super().backward(*arguments, **named)
            self.given += [weakref.ref(one) for one in found]
            return found

    backend = Watched()
    q, k = torch.zeros(1, 4, 4, 8).bfloat16(), torch.zeros(1, 20, 2, 8).bfloat16()
    with few_keys(6, element=2):
        InPieces(backend).backward(q, q, k, k, *backend.forward(q, k, k, causal=False), False)
    assert backend.alive == [0, 0, 0, 0]


def test_the_forecast_knows_of_deterministic_kernels() -> None:
    def forecast(deterministic: bool) -> int:
        settings = {"dtype": "bfloat16", "device": "cuda", "attention": "flash", "deterministic": deterministic}
        config = config_of(case(n=2, m=1), train=settings)
        return Forecast(config, make_plan(config), torch.device("cpu")).memory[0].terms["working set"]

    assert forecast(True) > forecast(False)


def run(rank: int, world: int, case: Case) -> tuple[RankReport, set[tuple[int, int, bool]]]:
    backend = Counted()
    choose = mock.patch.object(session_module, "choose_attention", lambda *_: (InPieces(backend), None))
    with choose, few_keys(20, element=4):
        session = Session(config_of(case))
        roughen(session.weights())
        backend.calls.clear()  # the warm-up's
        return report(session, session.step_gradients(*batch_of(case))), set(backend.calls)


@pytest.mark.parametrize(
    "case",
    [
        case(pp=2, n=4, m=3, v=2, recompute="all_but_attention"),
        case(pp=3, n=8, m=3, exchange="balanced", granule=2),
    ],
    ids=str,
)
def test_a_pipelines_gradients(case: Case, pool: Callable[[int], Pool]) -> None:
    ranks = pool(case.pp).run(run, case)
    assert discrepancies(case, [found for found, _ in ranks]) == []
    assert all(keys <= 20 for _, calls in ranks for _, keys, _ in calls)
    assert any(keys == 20 for _, calls in ranks for _, keys, _ in calls)
