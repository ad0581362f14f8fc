"""Rates by size, profiles written and read back, what is counted where a machine is measured, and the command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml
from typer.testing import CliRunner

from slimpipe.calibrate.compute import Bench, attention_rates, gemm_rate, memory_rate
from slimpipe.calibrate.links import link_rate
from slimpipe.cli import app
from slimpipe.config import load_config
from slimpipe.kernels.attention.plain import PlainAttention
from slimpipe.plan.elementwise import layer_traffic
from slimpipe.plan.flops import layer_flops_per_token
from slimpipe.plan.hardware_file import load_hardware, write_hardware
from slimpipe.plan.rates import SizedRate
from slimpipe.runtime.carrier import Carrier
from slimpipe.schedule import Network, PlanError, Rate
from tests.support.pool import Pool

ROOT = Path(__file__).parents[1]
H200 = ROOT / "configs/hardware/h200_facts.yaml"
MODEL = load_config(ROOT / "configs/llama_16l.yaml").model
SMALL = MODEL.model_copy(
    update={"hidden_size": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate_size": 48, "vocab_size": 64}
)


def test_rates_between_sizes() -> None:
    rate = SizedRate.of({4096: 674, 512: 532, 1024: 604}, 1e12)
    assert [rate.at(tokens) for tokens in (1, 512, 1024, 4096, 10**6)] == [532e12, 532e12, 604e12, 674e12, 674e12]
    assert rate.at(2048) == pytest.approx(639e12)  # half way from 1024 to 4096, by doublings
    assert SizedRate.of(680).at(7) == 680


def test_a_profile_reads_back_as_written(tmp_path: Path) -> None:
    plain = load_hardware(H200)
    for profile in (
        plain,
        replace(
            plain,
            gemm=SizedRate.of({512: 532e12, 8192: 685e12}),
            network=Network(Rate(2.5e-5, 3.7e11), None, 2),
            memory=4.0e12,
            host=Rate(1e-5, 5.53e10),
        ),
    ):
        write_hardware(tmp_path / "profile.yaml", profile, "measured", "one line\nand another")
        assert load_hardware(tmp_path / "profile.yaml") == profile
        assert (tmp_path / "profile.yaml").read_text().startswith("# one line\n# and another\n\nname:")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"gemm_tflops": {}}, "gemm_tflops: is empty; give a rate, or one for each number of tokens"),
        ({"gemm_tflops": {"many": 1}}, "gemm_tflops: 'many': must be a whole number of tokens > 0"),
        ({"gemm_tflops": {512: -1}}, "gemm_tflops: 512: -1: must be a number > 0"),
        ({"memory_gb_per_s": 0}, "memory_gb_per_s = 0: must be a number > 0"),
        ({"host": {"gb_per_s": 1}}, "host: latency_us is missing"),
    ],
)
def test_broken_tables_are_refused(tmp_path: Path, change: dict[str, object], line: str) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(H200.read_text()) | change))
    with pytest.raises(PlanError) as error:
        load_hardware(path)
    assert f"{path}: {line}" in str(error.value)


def test_a_link_that_nobody_knows_is_asked_for_in_vain() -> None:
    network = Network(Rate(0, 1), None, 2)
    assert network.rate(0, 1) == Rate(0, 1)
    with pytest.raises(PlanError, match=r"ranks 0 and 2 are on two nodes of 2, .* add between: "):
        network.rate(0, 2)


def test_memory_traffic_takes_its_time() -> None:
    """Width 4096, 32 and 8 heads of 128, MLP 14336, bf16, by hand for one token: a norm of 16 KiB, sum and norm of 32,
    a sum of 24, RoPE of 20, 8 KiB into the slots, SwiGLU 84; with slices a merge of 24. Backward 2 norms of 32 KiB,
    RoPE, SwiGLU 140."""
    kib = 1024
    assert layer_traffic(MODEL, "none", n=1).forward == (16 + 32 + 24 + 20 + 8 + 84) * kib
    assert layer_traffic(MODEL, "none", n=2).forward == (16 + 32 + 24 + 20 + 8 + 84 + 24) * kib
    once, often = (layer_traffic(MODEL, "none", n).backward for n in (1, 17))
    assert once == (64 + 20 + 140) * kib
    assert often - once == 8 * 2 * 1024 * 10
    norms = layer_traffic(MODEL, "norms", 1).backward - once
    assert norms == (32 + 84) * kib
    slow = replace(load_hardware(H200), memory=1e12).work(MODEL, 8, 4096)
    free = load_hardware(H200).work(MODEL, 8, 4096)
    assert slow.forward.dense - free.forward.dense == pytest.approx(8 * 4096 * 184 * kib / 1e12)
    assert (slow.forward.own, slow.backward.token) == (free.forward.own, free.backward.token)


def test_operations_are_counted_as_flops_are() -> None:
    """With every measurement taking a second, the rates are the operations: those of `plan.flops`."""
    bench = Bench(torch.device("cpu"), torch.float32, 0.001)

    def a_second(self: Bench, work: Callable[[], object]) -> float:
        work()
        return 0.25 if work.__name__ == "step" else 1.0  # four projections make one layer

    with mock.patch.object(Bench, "time", a_second):
        gemm, _ = layer_flops_per_token(SMALL, 64)
        assert gemm_rate(bench, SMALL, tokens=16) == 3 * 16 * gemm
        found = attention_rates(bench, PlainAttention(), SMALL, tokens=16, past=64)
        assert found.forward == 4 * 16 * 64 * 4 * 8
        assert (found.backward, found.own_forward) == (2.5 * found.forward, found.forward / 8)
        assert memory_rate(bench, megabytes=1) == 3 * 2**20


def test_links_are_agreed_on(pool: Callable[[int], Pool]) -> None:
    first, second = pool(2).run(measure_link)
    assert first == second
    assert first.latency > 0 and first.bandwidth > 0


def measure_link(rank: int, world: int) -> Rate:
    carrier = Carrier(torch.device("cpu"))
    group = carrier.new_group([0, 1], "inside")
    bench = Bench(carrier.device, torch.float32, 0.001)
    return link_rate(bench, carrier, group, peer=1 - rank, first=rank == 0, large=2**16)


def test_the_command(tmp_path: Path) -> None:
    model = tmp_path / "model.yaml"
    model.write_text(
        yaml.safe_dump(
            {
                "model": SMALL.model_dump(),
                "data": {"corpus": "python_stdlib", "sequence_length": 64},
                "train": {"steps": 1, "output": "unused", "global_batch": 1},
            }
        )
    )
    out = tmp_path / "profile.yaml"
    options = f"--model {model} --tokens 16,32 --past 64 --seconds 0.001 --device cpu --links {H200}"
    result = CliRunner().invoke(app, ["calibrate", str(out), *options.split()])
    assert result.exit_code == 0, result.output
    profile = load_hardware(out)
    assert profile.network == load_hardware(H200).network and profile.host is None and profile.memory is not None
    assert [tokens for tokens, _ in profile.gemm.points] == [16, 32]
    assert "Links: taken from another profile." in out.read_text()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("out.yaml", "--links: one process cannot measure links; start two with torchrun"),
        (f"out.yaml --links {H200} --tokens 16,x", "--tokens = 16,x: must be whole numbers above 0"),
        (f"out.yaml --links {H200} --seconds 0", "--seconds = 0.0: must be above 0"),
        (f"no/where/out.yaml --links {H200}", "--output = no/where/out.yaml: no/where is no folder"),
        ("out.yaml --links none.yaml", "none.yaml: cannot be read"),
    ],
)
def test_what_the_command_refuses(options: str, line: str) -> None:
    result = CliRunner().invoke(app, ["calibrate", *options.split()])
    assert result.exit_code == 2
    assert line in result.output
