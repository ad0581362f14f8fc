"""Which cases run, which rows stand for a system, and the pictures of them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import jobs
from benchmarks.peers import __main__ as command
from benchmarks.peers import plot
from benchmarks.peers import rows as results
from benchmarks.peers.cases import LEAN, PARTS, cases, expected_seconds, make
from benchmarks.peers.link import write_profile
from benchmarks.peers.measure import bound_seconds
from benchmarks.peers.systems import config_of
from benchmarks.pipeline import PROFILE
from slimpipe.config import ModelConfig
from slimpipe.plan.flops import step_flops
from slimpipe.plan.hardware_file import load_hardware

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 62.62 GiB"


def row(system: str, kib: int, mfu: float | None = None, failed: str = "", steps: int = 3, **more: Any) -> results.Row:
    name, case = make(system, {"recompute": more.pop("recompute", "full")}, 16, kib, 2, steps)
    found: dict[str, Any] = {"failed": failed, "out_of_memory": results.out_of_memory(failed)} if failed else {}
    if mfu is not None:
        found = {"mfu": mfu, "step_s": 7.0, "bound_share": 0.8, "peak_gib_by_rank": "90.5 100.5"}
    return {"case": name, **case, **found, **more}


def test_the_bound_at_64k_is_the_published_one() -> None:
    model = ModelConfig(layers=16, hidden_size=4096, heads=32, kv_heads=8, intermediate_size=14336, vocab_size=128256)
    share = step_flops(model, 65536, 2) / bound_seconds(model, 65536, 2, 2, load_hardware(PROFILE)) / (2 * 989e12)
    assert round(share, 2) == 0.56


def test_every_case_is_named_once_and_has_settings_that_load(tmp_path: Path) -> None:
    everything = [pair for part in PARTS for pair in cases(part)]
    assert len({name for name, _ in everything}) == len(everything)
    for name, case in everything:
        config = config_of(case)
        assert (config.data.sequence_length, config.train.global_batch) == (case["length"], case["m"]), name
        assert expected_seconds(case) > 0


def test_every_system_comes_once_before_any_comes_again() -> None:
    for part in ("64k", "slow", "128k", "16k"):
        systems = [case["system"] for _, case in cases(part)]
        first = [case["system"] for _, case in cases(part, first=True)]
        assert systems[: len(first)] == first == list(dict.fromkeys(systems))


def test_a_slow_link_takes_the_fast_transports_from_nccl() -> None:
    assert command.SLOW_LINK == {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    assert {case["link"] for _, case in cases("slow")} == {"slow"}
    assert {case["link"] for part in PARTS if part != "slow" for _, case in cases(part)} == {"fast"}


def test_the_best_setting_counts_and_failures_keep_their_reason() -> None:
    known = [
        row("megatron 1F1B", 64, failed=OOM, recompute="none"),
        row("megatron 1F1B", 64, 0.30),
        row("megatron 1F1B", 64, 0.33, recompute="block:6"),
        row("megatron 1F1B", 64, failed="stopped after 90 s", recompute="block:4"),
        row("torch 1F1B", 64, failed=OOM),
        # A step with cold caches is no result.
        row("torch 1F1B", 64, 0.5, steps=1),
    ]
    (systems,) = results.best(known).values()
    assert systems["megatron 1F1B"]["mfu"] == 0.33
    assert systems["torch 1F1B"]["failed"] == OOM
    table = results.markdown(known)
    assert "| 33.0% | 80.0% | 7.00 | 90.5 100.5 | 2 of 4 ran |" in table
    assert "| - | - | - | out of memory | 0 of 1 ran |" in table


def test_the_latest_row_of_a_case_counts_and_an_accident_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "peers.jsonl"
    written = [row("slimpipe", 64, failed="stopped after 90 s"), row("slimpipe", 64, 0.5), row("slimpipe", 128)]
    written[2] |= {"failed": "RuntimeError: NCCL error"}
    path.write_text("".join(json.dumps(one) + "\n" for one in [*written, row("torch 1F1B", 64, failed=OOM)]))
    found = results.read(path)
    assert [(one["system"], results.finished(one)) for one in found] == [
        ("slimpipe", True),
        ("slimpipe", False),
        ("torch 1F1B", True),
    ]


class Clock:
    """Time that passes as cases take it."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def options(**more: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"minutes": None, "limit": None, "ranks": 2} | more)


def pretend(monkeypatch: pytest.MonkeyPatch, reach: dict[str, int]) -> list[tuple[str, int, dict[str, str]]]:
    """Jobs whose cases run out of memory beyond `reach` KiB tokens; every case that was begun."""
    begun, clock = [], Clock()
    monkeypatch.setattr(command, "time", clock)

    def run(
        module: str, batch: list[tuple[str, jobs.Case]], ranks: int, limit: float, environment: dict[str, str]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        for name, case in batch:
            begun.append((case["system"], case["length"] // 1024, environment))
            clock.now += expected_seconds(case)
            fits = case["length"] // 1024 <= reach.get(case["system"], 1 << 20)
            done = {"mfu": 0.4, "step_s": 9.0, "peak_gib_by_rank": "9.0 8.0", "latency_us": 50.0, "gb_per_s": 2.0}
            yield name, done if fits else {"failed": OOM}

    monkeypatch.setattr(jobs, "run", run)
    return begun


def test_contexts_double_until_the_memory_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = pretend(monkeypatch, {"megatron 1F1B": 32, "FSDP2 + CP": 256})
    known = [row("FSDP2 + CP", 64, 0.4)]
    list(command.run(list(cases("longest")), options(), known))
    lengths = {system: [kib for name, kib, _ in begun if name == system] for system in LEAN}
    assert lengths["slimpipe"] == [16, 32, 64, 128, 256, 512]
    assert lengths["megatron 1F1B"] == [16, 32, 64]
    assert lengths["FSDP2 + CP"] == [128, 256, 512]  # 64K ran before
    reached = results.longest(known)
    assert reached["slimpipe"] == (512 * 1024, "not tried further")
    assert reached["megatron 1F1B"] == (32 * 1024, "out of memory at 64K")
    begun.clear()
    list(command.run(list(cases("longest")), options(), known))
    assert not [one for one in begun if one[0] == "megatron 1F1B"]


def test_no_case_begins_that_would_outlast_the_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = pretend(monkeypatch, {})
    todo = [pair for pair in cases("64k") if pair[1]["system"] == "torch 1F1B"]
    for many in range(len(todo) + 1):
        begun.clear()
        seconds = sum(expected_seconds(case) for _, case in todo[:many])
        list(command.run(todo, options(minutes=(seconds + 1) / 60), []))
        assert len(begun) == many


def test_slow_links_are_measured_before_slimpipe_plans_by_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    begun = pretend(monkeypatch, {})
    known: list[results.Row] = []
    list(command.run(list(cases("slow")), options(), known))
    assert begun[0][0] == "link" and all(command.SLOW_LINK.items() <= env.items() for _, _, env in begun)
    (planned,) = [one for one in known if one.get("exchange") == "balanced"]
    network = load_hardware(planned["hardware"]).network
    assert network.inside.bandwidth == network.between.bandwidth == 2e9
    assert network.inside.latency == pytest.approx(50e-6)


def test_a_profile_keeps_its_kernels(tmp_path: Path) -> None:
    path = tmp_path / "slow.yaml"
    write_profile({"latency_us": 50.0, "gb_per_s": 2.0}, PROFILE, path)
    assert load_hardware(path).gemm == load_hardware(PROFILE).gemm


def test_the_pictures_show_every_system_and_where_memory_is_out() -> None:
    known = [row("slimpipe", 16, 0.5), row("slimpipe", 64, 0.49), row("slimpipe", 256, 0.4, steps=1)]
    known += [row("megatron 1F1B", 16, 0.3), row("megatron 1F1B", 64, failed=OOM)]
    fast, memory = plot.mfu(known), plot.memory(known)
    assert [(one.system, list(one.points), list(one.failed)) for one in fast.series] == [
        ("slimpipe", [(16384, 50.0), (65536, 49.0)], []),
        ("megatron 1F1B", [(16384, 30.0)], [65536]),
    ]
    assert [length for length, _ in memory.series[0].points] == [16384, 65536, 262144]
    assert memory.series[0].points[0][1] == 100.5  # the fuller rank's
    drawing = ElementTree.fromstring(plot.draw(fast))
    text = "".join(drawing.itertext())
    assert all(word in text for word in ("slimpipe", "megatron 1F1B", "out of memory", "16K", "64K"))
    dots = [float(dot.get("cy", "nan")) for dot in drawing.iter() if dot.tag.endswith("circle")]
    # 30 %, then 50 and 49 %: higher is nearer to the top.
    assert dots[1] < dots[2] < dots[0]
