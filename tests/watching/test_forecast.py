"""The memory model and the lines before the first step: against measured peaks, a session's own tensors, and counts by
hand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.on_paper import forecast as paper
from benchmarks.pipeline import config_of as scale_config
from slimpipe.config import Config
from slimpipe.plan.footprint import KNOBS, Footprint
from slimpipe.plan.memory import output_chunk
from slimpipe.plan.peaks import peak_tflops
from slimpipe.runtime.in_order_transport import InOrderWorld
from slimpipe.runtime.routes import Routes
from slimpipe.runtime.symmetric.neighbours import Site
from slimpipe.train.forecast import Forecast, footprints
from slimpipe.train.planning import make_plan
from slimpipe.train.session import Session
from slimpipe.train.startup import describe, remedy
from slimpipe.train.swapping import plan_swaps
from tests.numerics.harness import S, batch_of, case, config_of
from tests.support.cover import Case
from tests.support.pool import Pool

ROOT = Path(__file__).parents[2]
GIB = 2**30


def carried(row: dict[str, Any]) -> dict[str, str]:
    """What moved a row's tensors: `auto` was NCCL when rows said so."""
    carrier, collectives = row.get("carrier", "auto").replace("auto", "nccl"), row.get("collectives", "auto")
    collectives = collectives.replace("auto", "nccl") if carrier == "symmetric" else "auto"
    return {"carrier": carrier, "collectives": collectives}


def settings(row: dict[str, Any], ranks: int, layers: int) -> Config:
    """The model and the layout of a row of benchmarks/results/pipeline.jsonl."""
    model = {"layers": layers, "hidden_size": 4096, "heads": 32, "kv_heads": 8, "intermediate_size": 14336}
    exchange = {"exchange": row.get("exchange", "off"), "hardware": row.get("hardware")}
    train = {"steps": 1, "output": "unused", "global_batch": row["m"], "dtype": "bfloat16", "device": "cuda"}
    return Config.from_dict(
        {
            "model": {**model, "vocab_size": 128256},
            "parallel": {"pp": ranks, **carried(row)},
            "pipeline": {"slices": row["n"], "virtual_stages": row["v"], "vocab_parallel": row["vocab"], **exchange},
            "memory": {"recompute": row["recompute"]},
            "data": {"corpus": "unused", "sequence_length": row["length"]},
            "train": train,
        }
    )


def forecast(config: Config) -> Forecast:
    return Forecast(config, make_plan(config), torch.device("cpu"))


@dataclass(frozen=True)
class OnGpu(Forecast):
    """A forecast for an H200 that is not here, of a given chunk of the output layer."""

    device_bytes = 143_771 * 2**20
    chunk = 2048


def on_gpu(config: Config, monkeypatch: pytest.MonkeyPatch) -> OnGpu:
    monkeypatch.setattr("slimpipe.kernels.fuse.is_available", lambda device: True)
    monkeypatch.setattr("slimpipe.train.startup.select_backend", lambda *_: SimpleNamespace(name="cudnn"))
    return OnGpu(config, make_plan(config), SimpleNamespace(type="cuda"))  # type: ignore[arg-type]


# ---- against measurements ----

CASES = ("64k-n16", "16k-n4-v1", "16k-n4-v2", "64k-n8", "64k-n16-vocab", "128k-n16-off", "128k-n16-balanced-paying")
MEASURED = {
    row["case"]: row
    for line in (ROOT / "benchmarks/results/pipeline.jsonl").read_text(encoding="utf-8").splitlines()
    if "by_rank" in (row := json.loads(line))
}


@pytest.mark.parametrize("name", CASES)
def test_peaks_measured_on_two_h200(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """4.5 B parameters in bf16, the whole step: what each rank holds all the time to 0.2 %, its peak to 1 %."""
    row = MEASURED[name]
    run = on_gpu(settings(row, ranks=2, layers=16), monkeypatch)
    run.__dict__["chunk"] = row["ce_chunk"]
    for predicted, measured in zip(run.memory, row["by_rank"], strict=True):
        held = ("weights", "fp32 gradients", "optimizer", "KV slots", "dK, dV", "workspaces")
        assert sum(predicted.terms[term] for term in held) / GIB == pytest.approx(measured["held_gib"], rel=2e-3)
        assert predicted.total / GIB == pytest.approx(measured["peak_gib"], rel=0.01)


SCALED = {
    row["case"]: row
    for line in (ROOT / "benchmarks/results/scale.jsonl").read_text(encoding="utf-8").splitlines()
    if "by_rank" in (row := json.loads(line))
}


@pytest.mark.parametrize("name", SCALED)
def test_peaks_measured_on_four_h200(name: str) -> None:
    """Every rank's, p = 2 and 4, to what the README says: not above the prediction, and not further below it than 1.5 %
    at n = 16, else 3.2 %. The reduced model's tensors of few MiB lie in blocks that the allocator does not cut
    (docs/scaling.md): up to 0.5 % above; and of its last rank what is left is 5.1 %."""
    row = SCALED[name]
    bound = 0.051 if "model" in row else 0.015 if row["n"] == 16 else 0.032
    above = 0.005 if "model" in row else 0.0
    memory = paper(scale_config(row | carried(row)), row["ce_chunk"]).memory
    for predicted, measured in zip(memory, row["by_rank"], strict=True):
        assert (1 - bound) * predicted.total <= measured["peak_gib"] * GIB <= (1 + above) * predicted.total


ON_TWO = [
    row
    for name in ("pipeline", "peers")
    for line in (ROOT / f"benchmarks/results/{name}.jsonl").read_text(encoding="utf-8").splitlines()
    if "by_rank" in (row := json.loads(line))
    and "ranks" in row
    and row.get("system", "slimpipe") == "slimpipe"
    # Its profile is the job's own, of a link that it measured.
    and row.get("hardware") != "build/slow_link.yaml"
]


@pytest.mark.parametrize("swap", [False, True])
def test_every_peak_on_two_h200_is_below_the_forecast(swap: bool) -> None:
    """By 2.4 % at most; where units go to the host, by 6.3 %: a twentieth more is reserved for what comes and goes."""
    rows = [row for row in ON_TWO if (row.get("swap", "off") != "off") == swap]
    assert rows
    for row in rows:
        memory = paper(scale_config(row | carried(row)), row["ce_chunk"]).memory
        for predicted, measured in zip(memory, row["by_rank"], strict=True):
            assert 1.0 <= predicted.total / GIB / measured["peak_gib"] <= (1.063 if swap else 1.024), row["case"]


# ---- against a session's own tensors ----


def held(rank: int, world: int, shape: Case) -> dict[str, int]:
    """Bytes of what a session of this rank has allocated, by the tensors themselves, after a step."""
    session = Session(config_of(shape))
    session.train_step(*batch_of(shape))
    slots = [layer for chunk in session.engine.layer_slots for layer in chunk.values()]

    def size(tensors: Any) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)

    return {
        "weights": size(session.parameters.values()),
        "fp32 gradients": size(session.gradient_buffer.views().values()),
        "optimizer": size(session.optimizer.state().values()),
        "KV slots": size(tensor for layer in slots for tensor in (layer.k, layer.v)),
        "dK, dV": size(tensor for layer in slots for tensor in (layer.dk, layer.dv)),
    }


@pytest.mark.parametrize(
    "shape",
    [
        case(pp=2, v=2, n=4, m=2, layers="uneven", micro_batch=2, qk_norm=True),
        case(pp=2, n=4, m=3, vocab_parallel=True),
        case(pp=2, n=1, m=2, tied=True, kv="mha"),
    ],
    ids=["chunks", "vocabulary", "tied, whole sequences"],
)
def test_what_a_session_holds_all_the_time(shape: Case, pool: Callable[[int], Pool]) -> None:
    """To the byte, rank by rank: weights, gradients, moments, slots and their gradients."""
    for predicted, found in zip(forecast(config_of(shape)).memory, pool(2).run(held, shape), strict=True):
        assert {term: predicted.terms[term] for term in found} == found


# ---- against counts by hand ----


def test_activations_of_unequal_chunks() -> None:
    """7 layers as 2, 2, 2, 1 over p 2, v 2: rank 1 has chunks of 2 and 1 layers. With n 4, m 1 it holds all of its 8
    units at once: 4 of each chunk."""
    config = config_of(case(pp=2, v=2, n=4, m=1), model={"layers": 7})
    terms = forecast(config).memory[1].terms
    # fp32, a token and layer: input 32, q 32, attention output 32 and residual 32, log-sum-exp 4 heads, gate and up 96,
    # norm outputs 64, product 48, two norms' statistics.
    layer = 4 * (32 + 32 + 32 + 32 + 4 + 96 + 64 + 48 + 2)
    rotary = 4 * 8  # cosine and sine of half a head each
    assert terms["activations"] == 16 * (4 * 2 * layer + 4 * 1 * layer + 8 * rotary)
    # 4 slots a chunk, of 2 KV heads of 8.
    assert terms["KV slots"] == 16 * 4 * (2 + 1) * 2 * 2 * 8 * 4 == terms["dK, dV"]


def test_transfers_and_output_layer() -> None:
    """p 2, n 4, m 2, whole vocabulary: rank 1 receives forwards and sends backwards, hidden tensors of 16 tokens."""
    run = forecast(config_of(case(pp=2, n=4, m=2)))
    hidden = 16 * 32 * 4
    posted = 3  # two ahead of the one in use
    assert run.memory[1].terms["transfers"] == (posted + 2) * hidden
    assert run.memory[0].terms["output layer"] == 0
    # Norm inputs and gradients of rank 1's four slices in flight; a chunk of 48 tokens' logits, fp32 and two more.
    assert run.memory[1].terms["output layer"] == 2 * 4 * hidden + 48 * 61 * (4 + 8)


def test_loan_buffers_only_with_loans() -> None:
    off, on = (
        forecast(config_of(case(pp=2, n=8, m=2, **keys))) for keys in ({}, {"exchange": "balanced", "granule": 4})
    )
    assert {rank.terms["loan buffers"] for rank in off.memory} == {0}
    # One helped slot at least: keys and values of a granule, a query there and an output with its LSE back.
    assert max(rank.terms["loan buffers"] for rank in on.memory) > 4 * (2 * 4 * 16 + 8 * 32)


def test_shared_rings_only_with_symmetric_memory() -> None:
    """p 3, n 8, m 2, no exchange. What is sent lies in rings, two tensors a link, and rank 1 has two links; arenas are
    of one size, with two counters of 64 bytes a link in front."""
    plain, shared = (forecast(symmetric(pp=3, n=8, m=2, carrier=carrier)).memory for carrier in ("auto", "symmetric"))
    hidden = 8 * 32 * 4
    assert {rank.terms["shared rings"] for rank in plain} == {0}
    assert {rank.terms["shared rings"] for rank in shared} == {4 * 2 * 64 + 2 * 2 * hidden}
    sent = [without.terms["transfers"] - rings.terms["transfers"] for without, rings in zip(plain, shared, strict=True)]
    assert sent == [2 * hidden, 4 * hidden, 2 * hidden]
    assert all(rank.own == rank.total - rank.terms["shared rings"] for rank in shared)
    # The exchange of small tensors: 4 MiB a pair, and two counters each.
    lent = forecast(symmetric(pp=2, n=8, m=2, carrier="symmetric", exchange="balanced", granule=4)).memory
    assert [rank.terms["shared rings"] for rank in lent] == [512 + 2 * hidden + 512 + 4 * 2**20] * 2


def test_rings_of_the_vocabulary_passes() -> None:
    """p 2, 8 tokens a slice, fp32. Rank 1 broadcasts its output and gives a part of the embeddings, rank 0 the other
    way round; statistics are three numbers a token, padded to 512 bytes; all of it twice. Counters: two of each of six
    lanes. A root has room for one part."""
    layout: dict[str, Any] = {"pp": 2, "n": 8, "m": 2, "carrier": "symmetric", "vocab_parallel": True}
    without, shared = (forecast(symmetric(**layout, collectives=one)).memory for one in ("nccl", "symmetric"))
    hidden = 8 * 32 * 4
    for before, after in zip(without, shared, strict=True):
        more = {term: after.terms[term] - before.terms[term] for term in KNOBS}
        assert {term: size for term, size in more.items() if size} == {
            "shared rings": 6 * 2 * 64 + 256 + 2 * (hidden + hidden + 512),
            "transfers": hidden,
        }


def test_passes_that_share_no_memory_have_no_room_for_parts() -> None:
    """Two ranks under `auto` that turn out to be on two hosts take what NCCL takes, and no more."""
    run = forecast(symmetric(pp=2, n=8, m=2, carrier="auto", vocab_parallel=True))
    of = partial(
        footprints, run.config, run.planned, run.placement, run.parameters, run.chunk, fused=False, backend="plain"
    )
    assert of(near=((0,), (1,))).ranks == of(near=()).ranks != of(near=((0, 1),)).ranks


def symmetric(carrier: str, collectives: str = "auto", **layout: Any) -> Config:
    return config_of(case(**layout), parallel={"pp": layout["pp"], "carrier": carrier, "collectives": collectives})


def test_shared_memory_is_not_reserved_once_more() -> None:
    """Two ranks that share memory, of which torch's allocator knows nothing."""
    config = symmetric(pp=2, n=4, m=2, carrier="symmetric")
    session = Session(config, transport=InOrderWorld(2).transport(0), rank=0)
    apart = session.to_reserve
    sites = [Site("host", name, frozenset({"one", "two"} - {name})) for name in ("one", "two")]
    session.routes = Routes(tuple(sites), True, "NCCL")
    rings = 512 + 2 * 16 * 32 * 4
    assert session.footprint.terms["shared rings"] == rings
    assert session.footprint == Forecast(config, session.planned, torch.device("cpu")).memory[0]
    # What NCCL's sends would keep is not reserved either: it lies in the rings.
    assert session.to_reserve == int(1.01 * (session.footprint.total - rings)) < apart


def test_more_is_reserved_where_tensors_come_and_go() -> None:
    stays, moves = (Session(config_of(case(n=4, m=2), memory={"swap": swap})) for swap in ("off", 0.5))
    assert stays.to_reserve == int(1.01 * stays.footprint.total)
    assert moves.to_reserve == int(1.05 * moves.footprint.total)


@pytest.mark.parametrize(("budget", "share"), [(1.03, 1.03), (2.0, 1.05), (0.99, 1.01)])
def test_what_is_reserved_keeps_to_the_budget(budget: float, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(config_of(case(n=4, m=2), memory={"swap": 0.5}))
    total = session.footprint.total
    memory = session.config.memory.model_copy(update={"gpu_budget_gib": budget * total / GIB})
    monkeypatch.setattr(session, "config", session.config.model_copy(update={"memory": memory}))
    assert session.footprint.total == total
    assert session.to_reserve == pytest.approx(share * total, abs=1)


@pytest.mark.parametrize("recompute", ["norms", "mlp", "all_but_attention", "full"])
def test_recomputation_moves_activations_into_one_blocks_working_set(recompute: str) -> None:
    none, less = (forecast(config_of(case(n=4, m=2, recompute=mode))).memory[0].terms for mode in ("none", recompute))
    assert less["activations"] < none["activations"] and less["working set"] >= none["working set"]
    assert {term for term in KNOBS if less[term] != none[term]} <= {"activations", "working set"}


def test_a_chunk_of_the_output_layer() -> None:
    """A fiftieth of what is free: 61 columns at 10 bytes."""
    plain = config_of(case(n=1, m=1, micro_batch=16))
    config = plain.model_copy(update={"train": plain.train.model_copy(update={"ce_chunk": None})})
    tokens = 16 * S
    assert output_chunk(plain, 1) == 48
    assert output_chunk(config, None) == tokens == 1024
    assert output_chunk(config, tokens * 610 * 50) == tokens and output_chunk(config, tokens * 610 * 50 - 50) == 512
    assert output_chunk(config, 0) == 256


# ---- what is shown ----


def test_the_lines_before_the_first_step() -> None:
    lines = describe(forecast(config_of(case(pp=2, v=2, n=4, m=2), model={"layers": 8}))).splitlines()
    assert lines[0] == (
        "slimpipe: slimpipe, pp 2, virtual stages 2, slices 4, microbatches 2; cpu, float32, attention plain"
    )
    assert lines[1] == "layers by stage: [2, 2, 2, 2]"
    assert lines[2] == "vocabulary whole, 48 tokens a chunk; exchange off; recompute none; swap off"
    assert lines[3].startswith("tokens a step: 128, 16 a slice; parameters: ")
    assert lines[4] == "memory by rank as predicted, in MiB:"
    assert lines[5].split()[:3] == ["rank", "holds", "weights"] and lines[5].endswith("total")
    assert "embedding, 0-1, 4-5" in lines[6] and "2-3, 6-7, head" in lines[7]
    assert "loan buffers" not in lines[5]
    # Between p - 1 = 1 of m n v + p - 1 = 17 slots.
    assert "5.9% if slices were equal; 32 units a step" in lines[8]
    assert lines[9] == "schedule: units in flight by rank 10, 8; KV slots by rank and chunk 6 + 4, 6 + 4"


@pytest.mark.parametrize(("layers", "uneven"), [(6, False), (7, True)])
def test_uneven_placement_is_said(layers: int, uneven: bool) -> None:
    said = describe(forecast(config_of(case(v=2, n=2), model={"layers": layers})))
    assert f"layers by stage: {[4, 3] if uneven else [3, 3]}" in said
    assert ("uneven: the layers do not divide by the stages" in said) == uneven


def big(length: int, recompute: str) -> Config:
    row = {"n": 16, "v": 1, "vocab": True, "length": length, "recompute": recompute, "m": 2}
    return settings(row, ranks=2, layers=16)


def test_a_run_that_does_not_fit_is_told_with_the_knob(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = [
        line
        for line in describe(on_gpu(big(131072, "none"), monkeypatch)).splitlines()
        if "memory of the device" in line
    ]
    assert line.startswith("warning: memory of the device: 140.4 GiB; rank 0 is predicted to use 1")
    assert line.endswith(
        "%, which does not fit. activations take the most: set memory.recompute: norms or memory.swap: auto, or raise "
        "pipeline.slices or parallel.pp"
    )


def test_a_run_that_swaps_fits_and_says_what_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """128K tokens that recompute only norms: 154 GiB without swap, within 90 % of an H200 with it."""
    config = big(131072, "norms")
    memory = config.memory.model_copy(update={"swap": "auto"})
    config = config.model_copy(update={"memory": memory})
    bare = on_gpu(config, monkeypatch)
    monkeypatch.setattr("slimpipe.train.swapping.Forecast", OnGpu)
    planned = plan_swaps(config, bare.planned, bare.device)
    run = OnGpu(config, planned, bare.device)
    assert max(found.total for found in bare.memory) > run.device_bytes
    assert 0.85 * run.device_bytes < max(found.total for found in run.memory) <= 0.9 * run.device_bytes
    said = describe(run)
    assert "swap auto" in said and "warning" not in said
    assert re.search(r"swap: rank 0 moves the most: \d+ of 32 units a step, [\d.]+ GiB out and back; ", said)
    less = {rank: bare.memory[rank].terms["activations"] - run.memory[rank].terms["activations"] for rank in (0, 1)}
    assert planned.swap is not None and all(0 < less[rank] <= planned.swap.moved(rank) for rank in (0, 1))
    terms = [{**found.terms, "activations": 0} for found in (*bare.memory, *run.memory)]
    assert terms[:2] == terms[2:]


def test_a_run_that_swap_cannot_make_fit_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    config = big(131072, "norms")
    memory = config.memory.model_copy(update={"swap": "auto", "kv_swap": "off", "gpu_budget_gib": 57.0})
    config = config.model_copy(update={"memory": memory})
    bare = on_gpu(config, monkeypatch)
    monkeypatch.setattr("slimpipe.train.swapping.Forecast", OnGpu)
    said = describe(OnGpu(config, plan_swaps(config, bare.planned, bare.device), bare.device))
    assert re.search(r"warning: swap: all that can be moved leaves [\d.]+ GiB above the budget", said)


def test_a_run_whose_keys_stream_fits_and_says_so() -> None:
    """1M tokens on two H200: activations alone leave 170 GiB on the fuller rank; with two of eight layers' keys and
    values and their gradients on the device it is within 90 % of the GPU."""
    row = {"ranks": 2, "layers": 16, "steps": 1, "length": 1 << 20, "m": 1, "n": 64, "v": 1, "vocab": True}
    case_ = row | {"recompute": "all_but_attention", "swap": "auto"}
    alone, both = (paper(scale_config(case_ | {"kv_swap": keys})) for keys in ("off", "auto"))
    assert max(found.total for found in alone.memory) > 1.1 * (alone.device_bytes or 0)
    assert max(found.total for found in both.memory) <= 0.9 * (both.device_bytes or 0)
    for term in ("KV slots", "dK, dV"):
        assert [found.terms[term] for found in both.memory] == [found.terms[term] // 4 for found in alone.memory]
    kv = both.planned.kv
    assert kv is not None and kv.ranks == (True, True)
    kept = sum(alone.memory[0].terms[term] for term in ("KV slots", "dK, dV"))
    assert both.planned.kv_bytes(0) == kept == 96 * GIB
    said = describe(both)
    assert "warning" not in said
    assert re.search(
        r"keys and values: in host memory, by layer, on all ranks; rank 0 has the most: 96\.00 GiB there, 24\.00 GiB "
        r"on the device; 2048\.00 GiB out and 4064\.00 GiB back a step; waits 0\.\d+ s on paper\nswap: rank ",
        said,
    )


def test_a_run_that_fits_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said = describe(on_gpu(big(65536, "norms"), monkeypatch))
    assert "\nmemory of the device: 140.4 GiB; rank 0 is predicted to use 69%\n" in said and "warning" not in said


def test_every_term_has_a_knob() -> None:
    run = forecast(config_of(case(pp=2, n=4, m=2, recompute="full"), memory={"recompute": "full", "swap": 0.5}))
    assert list(run.memory[0].terms) == list(KNOBS)
    for term, knob in KNOBS.items():
        assert remedy(run, Footprint({name: int(name == term) for name in KNOBS})) == f"{term} take the most: {knob}"


def test_the_next_mode_of_recomputation_is_advised() -> None:
    only = Footprint({"activations": 1})
    found = [remedy(forecast(config_of(case(n=2, recompute=mode))), only) for mode in ("none", "mlp", "full")]
    rest = "memory.swap: auto, or raise pipeline.slices or parallel.pp"
    modes = ("memory.recompute: norms or ", "memory.recompute: all_but_attention or ", "")
    assert found == [f"activations take the most: set {mode}{rest}" for mode in modes]
    swapped = forecast(config_of(case(n=2, recompute="full"), memory={"recompute": "full", "swap": 0.5}))
    assert remedy(swapped, only) == "activations take the most: raise pipeline.slices or parallel.pp"


def test_of_many_ranks_the_ends_and_the_fullest_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"n": 16, "v": 1, "vocab": True, "length": 65536, "recompute": "none", "m": 1}
    run = on_gpu(settings(row, ranks=32, layers=64), monkeypatch)
    lines = describe(run).splitlines()
    rows = [line.split()[0] for line in lines if line.startswith("  ")]
    assert rows == ["rank", *map(str, range(8)), "...", *map(str, range(25, 32))]
    assert "units in flight by rank 16, 16, ..., 16, 16;" in lines[-1]


@pytest.mark.parametrize(
    ("device", "dtype", "peak"),
    [
        ("NVIDIA H200", "bfloat16", 989.0),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.0),
        ("NVIDIA H100 PCIe", "bfloat16", 756.0),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312.0),
        ("NVIDIA RTX A4000", "bfloat16", None),
        ("NVIDIA L40", "bfloat16", 181.0),
        ("NVIDIA H200", "float32", None),
        ("cpu", "bfloat16", None),
    ],
)
def test_peaks_of_devices(device: str, dtype: str, peak: float | None) -> None:
    assert peak_tflops(device, dtype) == peak
