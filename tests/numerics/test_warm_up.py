"""The warm-up meets every kernel of a step: what the first step compiled would be loaded behind posted receives, which
has stopped runs on GPUs (docs/log.md, 2026-11-30)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from slimpipe.kernels import fuse, merge
from slimpipe.train.session import Session
from tests.numerics.harness import batch_of, case, config_of
from tests.support.cover import Case
from tests.support.pool import Pool

_COMMON: dict[str, Any] = {"vocab_parallel": True, "granule": 2}
CASES = [
    case(pp=3, n=8, m=2, exchange="balanced", recompute="norms", **_COMMON),
    case(pp=2, v=2, n=8, m=3, exchange="balanced", recompute="full", **_COMMON),
    # Pasts in two ranges: merges of three parts with no exchange.
    case(pp=2, v=2, n=4, m=3, recompute="mlp"),
]


def compiled_in_turn(rank: int, world: int, case: Case) -> tuple[list[str], list[str]]:
    """Functions that the compiler was given in the warm-up, and in the two steps after it."""
    names: list[str] = []
    made: dict[int, Callable[..., Any]] = {}

    def compiled(function: fuse.Fused[..., Any]) -> Callable[..., Any]:
        def note(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
            names.append(function.plain.__name__)
            return graph.forward

        if id(function) not in made:
            made[id(function)] = torch.compile(function.plain, dynamic=False, backend=note)
        return made[id(function)]

    with (
        mock.patch.object(fuse, "runs_compiled", lambda argument: True),
        mock.patch.object(fuse.Fused, "compiled", property(compiled)),
        mock.patch.object(merge, "extension_available", lambda: False),
        mock.patch.object(torch._dynamo.config, "recompile_limit", 64),
    ):
        session = Session(config_of(case))
        warm = len(names)
        tokens, labels = batch_of(case)
        for _ in range(2):
            session.train_step(tokens, labels)
    torch._dynamo.reset()
    return names[:warm], names[warm:]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_step_compiles_what_the_warm_up_has_not(case: Case, pool: Callable[[int], Pool]) -> None:
    for rank, (warm, later) in enumerate(pool(case.pp).run(compiled_in_turn, case)):
        assert "_merge_into" in warm
        assert later == [], f"rank {rank}"
