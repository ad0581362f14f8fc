"""The warm-up meets every kernel of a step.

What the first step compiles or plans is loaded behind posted receives, which has stopped runs on GPUs (docs/log.md,
2026-11-30).
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple
from unittest import mock

import pytest
import torch

from slimpipe.kernels import fuse, merge
from slimpipe.kernels.attention import PlainAttention
from slimpipe.kernels.attention.flash_package import PackagedFlashAttention
from slimpipe.runtime.reserve import SMALL, reserve
from slimpipe.train import session as session_module
from slimpipe.train.session import Session
from tests.numerics.harness import batch_of, case, config_of
from tests.support.cover import Case
from tests.support.fake_flash import package
from tests.support.pool import Pool
from tests.support.triton_variants import Variant, launches_noted

MIB = SMALL
_COMMON: dict[str, Any] = {"vocab_parallel": True, "granule": 2}
# A third microbatch meets no kernel and no shape that two have not.
CASES = [
    case(pp=3, n=8, m=2, exchange="balanced", recompute="norms", **_COMMON),
    case(pp=2, v=2, n=8, m=2, exchange="balanced", recompute="full", **_COMMON),
    # Pasts in two ranges: merges of three parts with no exchange.
    case(pp=2, v=2, n=4, m=2, recompute="mlp"),
]


class Met(NamedTuple):
    """What was asked for, in turn: functions of the compiler, attention blocks as cuDNN tells them apart, and Triton
    kernels as Triton does."""

    compiled: list[str]
    attention: list[tuple[Any, ...]]
    triton: list[Variant]


def met_in_turn(
    rank: int,
    world: int,
    case: Case,
    model: str = "llama",
    memory: dict[str, Any] | None = None,
    bottom_right: bool = False,
    triton: Literal["contiguous", "by heads"] | None = None,
    layers: int | None = None,
) -> tuple[Met, Met]:
    """In the warm-ups of training and of evaluation, and in two steps and an evaluation after them.

    `bottom_right`: with a backend that takes a slice and the past in front of it in one call. `triton`: with Triton
    forms, and gradients of keys so laid out; else with the forms that run where Triton's do not. `layers`: one a
    chunk, unless said else. Layers that are alike meet the same.
    """
    warm, later = Met([], [], []), Met([], [], [])
    now = warm
    made: dict[int, Callable[..., Any]] = {}

    def compiled(function: fuse.Fused[..., Any]) -> Callable[..., Any]:
        def note(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
            now.compiled.append(function.plain.__name__)
            return graph.forward

        if id(function) not in made:
            made[id(function)] = torch.compile(function.plain, dynamic=False, backend=note)
        return made[id(function)]

    def noted(which: str) -> Callable[..., Any]:
        plain = getattr(PlainAttention, which)

        def run(self: PlainAttention, *arguments: Any, causal: bool) -> Any:
            q, k, v = arguments[-5:-2] if which == "backward" else arguments
            # On a GPU autograd's thread runs the backwards, and cuDNN's graphs are each thread's own.
            thread = "autograd's" if torch._C._current_autograd_node() is not None else "main"
            now.attention.append((thread, which, *((x.shape, x.stride()) for x in (q, k, v)), causal))
            out = plain(self, *arguments, causal=causal)
            return tuple(x.contiguous() for x in out) if triton == "contiguous" and which == "backward" else out

        return run

    def noted_triton(function: fuse.Fused[..., Any]) -> Any:
        """It is launched in name only; the plain form does its work."""
        if function._triton_module is None:
            return None
        module = importlib.import_module(function._triton_module)

        def run(*arguments: Any) -> Any:
            module.run(*arguments)
            return function.plain(*arguments)

        return SimpleNamespace(fits=module.fits, run=run)

    with (
        launches_noted(lambda variant: now.triton.append(variant)) if triton else contextlib.nullcontext(),
        mock.patch.object(fuse, "runs_triton", lambda argument: triton is not None),
        mock.patch.object(fuse.Fused, "triton", property(noted_triton)),
        mock.patch.object(PlainAttention, "forward", noted("forward")),
        mock.patch.object(PlainAttention, "backward", noted("backward")),
        mock.patch.object(fuse, "runs_compiled", lambda argument: True),
        mock.patch.object(fuse.Fused, "compiled", property(compiled)),
        mock.patch.object(merge, "extension_available", lambda: False),
        mock.patch.object(torch._dynamo.config, "recompile_limit", 64),
        contextlib.ExitStack() as stack,
    ):
        if bottom_right:
            backend = PackagedFlashAttention("flash4", package("flash4", []))
            choose = mock.patch.object(session_module, "choose_attention", lambda *_: (backend, None))
            stack.enter_context(choose)
        more = {} if memory is None else {"memory": {"recompute": case.recompute, **memory}}
        session = Session(config_of(case, model={"name": model, "layers": layers or case.pp * case.v}, **more))
        tokens, labels = batch_of(case)
        now = later
        for _ in range(2):
            session.train_step(tokens, labels)
        now = warm
        evaluation = session.evaluation
        now = later
        evaluation.token_losses(tokens, labels)
    torch._dynamo.reset()
    return warm, later


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_step_and_no_evaluation_meets_what_the_warm_up_has_not(case: Case, pool: Callable[[int], Pool]) -> None:
    for rank, (warm, later) in enumerate(pool(case.pp).run(met_in_turn, case)):
        assert "_merge_into" in warm.compiled
        assert later.compiled == [], f"rank {rank}"
        assert {block[0] for block in later.attention} == {"main", "autograd's"}
        assert set(later.attention) <= set(warm.attention), f"rank {rank}"


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_a_slice_and_its_past_in_one_call_are_met_too(case: Case, pool: Callable[[int], Pool]) -> None:
    """Its gradients of keys and values are a part of longer ones, and laid out as such."""
    for rank, (warm, later) in enumerate(pool(case.pp).run(met_in_turn, case, "llama", None, True)):
        assert later.compiled == [], f"rank {rank}"
        # flash-attn's kernels are for any length.
        kinds = [{(thread, which, causal) for thread, which, *_, causal in met.attention} for met in (later, warm)]
        assert kinds[0] <= kinds[1], f"rank {rank}"


KERNELS = {"_backward", "_sum_parts", "_add_norm", "_merge", "_add"}
KERNELS |= {"_again", "_rotate", "_rotate_back", "_swiglu", "_swiglu_backward"}


# The first meets every variant that any of them meets.
@pytest.mark.parametrize(
    ("case", "memory"), [(CASES[0], {}), (CASES[-1], {"swap": 1.0, "kv_swap": "on"})], ids=["all", "swap"]
)
def test_no_step_and_no_evaluation_meets_a_triton_kernel_that_the_warm_up_has_not(
    case: Case, memory: dict[str, Any], pool: Callable[[int], Pool]
) -> None:
    pytest.importorskip("triton")
    for rank, (warm, later) in enumerate(pool(case.pp).run(met_in_turn, case, "llama", memory, False, "contiguous")):
        assert {variant.kernel for variant in later.triton} == KERNELS, f"rank {rank}"
        assert set(later.triton) <= set(warm.triton), f"rank {rank}"
        assert later.compiled == [], f"rank {rank}"
        assert not set(fuse.ON_GPUS) & set(warm.compiled), f"rank {rank}"
        # The final norm has no residual stream beside it.
        norms = {variant for variant in later.triton if variant.kernel == "_backward"}
        assert len(norms) == (2 if rank == case.pp - 1 else 1)


def test_a_kernel_that_only_gradients_from_other_ranks_fit_is_met_too(pool: Callable[[int], Pool]) -> None:
    """Those of plain attention are laid out by heads; or they are a part of longer ones."""
    pytest.importorskip("triton")
    for bottom_right in (False, True):
        found = pool(CASES[1].pp).run(met_in_turn, CASES[1], "llama", {}, bottom_right, "by heads")
        assert any("_add" in {variant.kernel for variant in later.triton} for _, later in found)
        for rank, (warm, later) in enumerate(found):
            assert set(later.triton) <= set(warm.triton), f"rank {rank}"


@pytest.mark.parametrize("recompute", ["none", "norms", "all_but_attention"])
def test_what_comes_back_from_the_host_is_met_too(recompute: str, pool: Callable[[int], Pool]) -> None:
    """It is another tensor than what was saved, and records no gradient, by which the compiler tells them apart."""
    swapped = case(pp=2, n=8, m=2, exchange="balanced", recompute=recompute, **_COMMON)
    for rank, (warm, later) in enumerate(pool(2).run(met_in_turn, swapped, "llama", {"swap": 1.0})):
        assert later.compiled == [], f"rank {rank}"
        assert set(later.attention) <= set(warm.attention), f"rank {rank}"


def test_keys_that_stream_are_met_too(pool: Callable[[int], Pool]) -> None:
    streamed = case(pp=2, v=2, n=8, m=2, recompute="all_but_attention", vocab_parallel=True)
    for rank, (warm, later) in enumerate(pool(2).run(met_in_turn, streamed, "llama", {"swap": 1.0, "kv_swap": "on"})):
        assert later.compiled == [], f"rank {rank}"
        assert set(later.attention) <= set(warm.attention), f"rank {rank}"


UNLIKE = [
    # Three layers a chunk, and two; with n = 2 every slice is a first or a last one.
    (case(pp=2, n=4, m=2, recompute="norms", vocab_parallel=True), 6),
    (case(pp=2, n=4, m=2, recompute="full", vocab_parallel=True), 6),
    (case(pp=2, v=2, n=2, m=2, recompute="all_but_attention"), 8),
]


@pytest.mark.parametrize(("case", "layers"), UNLIKE, ids=str)
def test_every_block_of_a_chunk_is_met_however_unlike(case: Case, layers: int, pool: Callable[[int], Pool]) -> None:
    model = "tests.support.unlike_models:Unlike"
    for rank, (warm, later) in enumerate(pool(case.pp).run(met_in_turn, case, model, None, False, None, layers)):
        assert {"of_odd_layers", "of_another_class"} <= set(warm.compiled), f"rank {rank}"
        assert later.compiled == [], f"rank {rank}"
        assert set(later.attention) <= set(warm.attention), f"rank {rank}"


def test_blocks_without_attention_are_met_too(pool: Callable[[int], Pool]) -> None:
    model = "tests.support.unlike_models:Sparse"
    for warm, later in pool(2).run(met_in_turn, case(pp=2, v=2, n=4, m=2), model, None, False, None, 8):
        assert later.compiled == [] and set(later.attention) <= set(warm.attention)


@pytest.mark.parametrize("memory", [{}, {"swap": 1.0, "kv_swap": "on"}], ids=["plain", "swap"])
def test_it_leaves_random_numbers_and_gradients_alone(memory: dict[str, Any]) -> None:
    """Else swaps, for which it runs more, would change what a model with dropout drops."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    session = Session(config_of(case(n=4, m=2), memory=memory))
    assert torch.equal(torch.get_rng_state(), before)
    assert all((gradient == 0).all() for gradient in session.gradients().values())
    assert all(parameter.grad is None for parameter in session.parameters.values())


def buffers_in_turn(rank: int, world: int, case: Case) -> list[dict[str, tuple[int, int]]]:
    """Address and bytes of the exchange's buffers behind the warm-up, two steps, and two evaluations."""
    session = Session(config_of(case))
    found = []
    for run in (lambda *_: None, session.train_step, session.train_step, session.token_losses, session.token_losses):
        run(*batch_of(case))
        loans = session.engine.loans
        assert loans is not None
        found.append({str(key): (flat.data_ptr(), flat.nbytes) for key, flat in loans.buffers.flat.items()})
        if session.evaluation.engine.loans is not None:
            assert session.evaluation.engine.loans.buffers is loans.buffers
    return found


@pytest.mark.parametrize(
    "case",
    [
        case(pp=3, n=8, m=2, exchange="balanced", recompute="none", **_COMMON),
        case(pp=2, n=8, m=2, exchange="balanced", recompute="full", granule=2),
        case(pp=2, n=8, m=2, exchange="balanced", recompute="none", granule=2, keep="kv"),
    ],
    ids=str,
)
def test_no_step_takes_memory_for_the_exchanges_buffers(case: Case, pool: Callable[[int], Pool]) -> None:
    for rank, (warm, *later) in enumerate(pool(case.pp).run(buffers_in_turn, case)):
        assert sum(nbytes for _, nbytes in warm.values()) > 0
        assert later == [warm] * 4, f"rank {rank}"


def made(rank: int, world: int, case: Case, model: str, options: dict[str, Any]) -> str:
    name = f"tests.support.unlike_models:{model}"
    try:
        Session(config_of(case, model={"name": name, "layers": 6, "options": options}))
    except ValueError as error:
        return str(error)
    return "nothing wrong"


PLAIN, NARROW = ["float32"] * 3, ["bfloat16"] * 3
OTHERS = "attend in other shapes or dtypes than those of rank"


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        ("Unlike", {}, "attends in other shapes or dtypes than layers before it; set it to off"),
        ("Sparse", {}, "did not call slice.attend; set it to off"),
        ("HalfHeads", {}, OTHERS),
        ("UnequalLayers", {"dtypes": [PLAIN]}, "nothing wrong"),
        ("UnequalLayers", {"dtypes": [PLAIN, NARROW]}, "than layers before it"),
        ("UnequalLayers", {"dtypes": [PLAIN] * 3 + [NARROW] * 3}, OTHERS),
        ("UnequalLayers", {"dtypes": [["float32", "float32", "bfloat16"]]}, "v bfloat16 [1, 8, 2, 8]; give"),
        ("UnequalLayers", {"dtypes": [["bfloat16", "float32", "float32"]]}, "with q bfloat16 [1, 8, 4, 8], k float32"),
        ("UnequalLayers", {"dtypes": [PLAIN], "width": 6}, "k float32 [1, 8, 2, 8], v float32 [1, 8, 2, 6]; give"),
    ],
    ids=str,
)
def test_the_exchange_lends_between_like_layers_alone(
    model: str, options: dict[str, Any], said: str, pool: Callable[[int], Pool]
) -> None:
    """What is received into buffers made for other shapes or dtypes would be garbage, and gloo does not always say."""
    lending = case(pp=2, n=8, m=2, exchange="balanced", granule=2, recompute="none")
    for text in pool(2).run(made, lending, model, options):
        assert said in text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("WithAWideBlock", "layer 1 returns float64 [2, 16, 32] where float32 [2, 16, 32] is needed"),
        ("WithAShortBlock", "layer 1 returns float32 [2, 15, 32] where float32 [2, 16, 32] is needed"),
        ("WithAWideEmbedding", "the embedding returns float64 [2, 16, 32] where float32"),
        ("WithAWideHead", "the head returns float64 [2, 16, 32] where float32"),
    ],
)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_part_that_returns_what_the_next_cannot_take_is_told(recompute: str, name: str, said: str) -> None:
    config = config_of(
        case(n=4, micro_batch=2, recompute=recompute), model={"name": f"tests.support.failing_models:{name}"}
    )
    with pytest.raises(ValueError, match=f"^model.name: {re.escape(said)}"):
        Session(config)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_block_that_attends_as_another_is_told_before_the_first_step(recompute: str) -> None:
    config = config_of(case(n=4, recompute=recompute), model={"name": "tests.support.failing_models:OfOneIndex"})
    said = r"^model.name: the block of layer 1 calls slice.attend\(layer=0\); pass the block's own index$"
    with pytest.raises(ValueError, match=said):
        Session(config)


@pytest.mark.parametrize(
    ("total", "small", "allocated", "free", "taken"),
    [
        (100 * MIB, 8 * MIB, 40 * MIB, 400 * MIB, 60 * MIB),
        (30 * MIB, 8 * MIB, 40 * MIB, 400 * MIB, 0),  # predicted below what is there already
        (30 * MIB, 8 * MIB, 40 * MIB, 0, 0),  # and nothing is left, not even a MiB
        (900 * MIB, 8 * MIB, 40 * MIB, 400 * MIB, 380 * MIB),  # predicted above the device
        (100 * MIB, 80 * MIB, 40 * MIB, 400 * MIB, 60 * MIB),  # nearly all of it small
    ],
)
def test_no_more_is_reserved_than_is_missing_and_free(
    total: int, small: int, allocated: int, free: int, taken: int
) -> None:
    asked: list[int] = []

    def empty(size: int, **_: Any) -> SimpleNamespace:
        asked.append(size)
        return SimpleNamespace(nbytes=size)

    with (
        mock.patch.object(torch, "empty", empty),
        mock.patch.multiple(
            torch.cuda,
            empty_cache=lambda: None,
            mem_get_info=lambda device: (free, 2**40),
            memory_allocated=lambda device: allocated,
        ),
    ):
        assert reserve(total, small, torch.device("cuda", 0)) == sum(asked) == taken
    # The allocator keeps tensors of up to a MiB in segments of their own.
    assert sum(size for size in asked if size <= MIB) == min(small, taken)
