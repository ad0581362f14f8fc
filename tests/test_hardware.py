"""Hardware profiles: what they say, what follows for a model, and what is wrong with a broken one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from slimpipe.config import Config, Recompute, load_config
from slimpipe.plan.exchange import ExchangeSetting
from slimpipe.plan.flops import layer_flops_per_token, recomputed_shares
from slimpipe.plan.hardware import before_attention, loan_bytes
from slimpipe.plan.hardware_file import load_hardware
from slimpipe.plan.predict import predict
from slimpipe.schedule import LinkCost, PlanError, Rate, Shape, add_exchange, build, simulate
from slimpipe.train.planning import make_plan

ROOT = Path(__file__).parents[1]
H200 = ROOT / "configs/hardware/h200_facts.yaml"
MODEL = load_config(ROOT / "configs/llama_16l.yaml").model


def test_profile_reads_as_written() -> None:
    profile = load_hardware(H200)
    assert profile.name == "H200"
    rates = (profile.gemm, profile.forward, profile.backward, profile.own_forward, profile.own_backward)
    assert [rate.at(4096) for rate in rates] == [680e12, 590e12, 535e12, 483e12, 425e12]
    assert profile.network.rate(0, 7) == Rate(25e-6, 370e9)
    assert profile.network.rate(7, 8) == Rate(25e-6, 50e9)
    for path in (ROOT / "configs/hardware").glob("*.yaml"):
        load_hardware(path)


def test_work_of_a_model() -> None:
    """8 layers, slices of 4096 tokens of 65536, against the count of operations that MFU uses."""
    profile, n = load_hardware(H200), 16
    same = replace(profile, own_forward=profile.forward, own_backward=profile.backward)
    work = same.work(MODEL, layers=8, slice_tokens=4096)
    gemm, attention = layer_flops_per_token(MODEL, 65536)
    assert work.forward.dense == pytest.approx(8 * 4096 * gemm / 680e12)
    assert work.backward.dense == pytest.approx(2 * work.forward.dense)
    # A token meets (S + 1) / 2 keys there, and half of its own slice here.
    mean = work.mean_forward(n) - work.forward.dense
    assert mean == pytest.approx(8 * 4096 * attention / 590e12, rel=1e-4)
    assert work.backward.token / work.forward.token == pytest.approx(2.5 * 590 / 535)
    # A whole slice of past at docs/h200.md's rate: 4 x 4096 x 4096 x 32 x 128 operations.
    assert 4096 * work.forward.token / 8 == pytest.approx(4 * 4096**2 * 4096 / 590e12)
    shared = work.with_attention_share(n, 0.8)
    assert shared.mean_forward(n) == pytest.approx(work.mean_forward(n))
    assert shared.forward.dense == pytest.approx(0.2 * work.mean_forward(n))
    assert shared.backward.dense == pytest.approx(2 * shared.forward.dense)


def test_recompute_takes_time() -> None:
    """What backwards make again, at the forward's rates."""
    profile = load_hardware(H200)
    plain = profile.work(MODEL, 8, 4096)
    works = {mode: plain.recomputing(*recomputed_shares(MODEL, mode)) for mode in get_args(Recompute)}
    extra = {mode: (work.backward.dense - plain.backward.dense) / plain.forward.dense for mode, work in works.items()}
    all_but = (2 * 14336 + 2 * 4096) / 53248
    assert extra == pytest.approx(
        {"none": 0, "norms": 0, "mlp": 2 * 14336 / 53248, "all_but_attention": all_but, "full": all_but}
    )
    assert all(work.forward == plain.forward for work in works.values())
    full = works["full"]
    assert full.again == replace(plain.forward, dense=all_but * plain.forward.dense)
    assert full.backward.token == plain.backward.token + plain.forward.token
    assert full.backward.own == plain.backward.own + plain.forward.own
    assert all(works[mode].backward.token == plain.backward.token for mode in works if mode != "full")
    twice = full.with_attention_share(16, 0.8)
    assert twice.again is not None
    assert twice.again.token == pytest.approx(twice.forward.token)
    assert twice.again.dense == pytest.approx(all_but * twice.forward.dense)


def test_sizes_of_a_model() -> None:
    """GQA with 8 of 32 heads of 128: K and V of a token are 4 KiB in bf16, a slice's query 8 KiB a token."""
    sizes = loan_bytes(MODEL, 4096)
    assert (sizes.kv_token, sizes.query, sizes.lse) == (4096, 4096 * 8192, 4 * 4096 * 32)
    assert before_attention(MODEL) == pytest.approx((4096 + 2048) / (2 * 4096 + 2048 + 3 * 14336))
    profile = load_hardware(H200)
    assert profile.link(MODEL, 8, 4096) == LinkCost(25e-6, 370e9, 4096 * 8192)
    assert profile.link(MODEL, 16, 4096).bandwidth == 50e9


def test_setting_refusals() -> None:
    profile = load_hardware(H200)
    with pytest.raises(PlanError, match=r"--sequence = 1000: not divisible by --slices = 16"):
        ExchangeSetting.on_hardware(profile, MODEL, Shape(2, 1, 16, 1), 1000, None)
    with pytest.raises(PlanError, match="pipeline.exchange needs stages of equally many layers"):
        ExchangeSetting.on_hardware(profile, MODEL, Shape(3, 1, 16, 1), 65536, None)


def test_slow_links_take_their_toll() -> None:
    shape = Shape(2, 1, 16, 2)
    plan = build("slimpipe", shape)
    profile = load_hardware(H200)
    found = []
    for bandwidth in (370e9, 100e9, 20e9):
        network = replace(profile.network, inside=Rate(25e-6, bandwidth))
        setting = ExchangeSetting.on_hardware(replace(profile, network=network), MODEL, shape, 131072, None)
        found.append(len(setting.exchange(plan, "balanced").loans))
        assert setting.exchange(plan, "off").loans == ()
    assert found == sorted(found, reverse=True)
    assert found[0] > 50 > 10 > found[-1]


@pytest.mark.parametrize("mode", ["all_but_attention", "full"])
def test_loans_pay_where_backwards_run_longer(mode: Recompute) -> None:
    """With the transfers of both runs of attention in `full`."""
    shape = Shape(2, 1, 16, 2)
    plan = build("slimpipe", shape)
    setting = ExchangeSetting.on_hardware(load_hardware(H200), MODEL, shape, 131072, None, mode)
    made = {}
    for kind in ("off", "balanced"):
        exchange = setting.exchange(plan, kind)
        assert exchange.again == (mode == "full")
        lowered = add_exchange(plan, exchange)
        made[kind] = simulate(lowered, setting.work.costs(), gatherings=setting.gatherings(exchange)).makespan
    assert len(exchange.loans) > 50
    assert made["balanced"] < 0.97 * made["off"]
    # No faster than all work spread evenly over both ranks.
    work, units = setting.work, 2 * 16
    mean = work.mean_forward(16) + work.backward.stays + work.backward.token * work.slice_tokens * 15 / 2
    assert made["balanced"] >= units * mean


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"gemm_tflops": None}, "gemm_tflops is missing"),
        ({"gemm": 1}, "gemm: unknown key; known are name, ranks_per_node"),
        ({"gemm_tflops": "fast"}, "gemm_tflops = 'fast': must be a number > 0"),
        ({"gemm_tflops": 0}, "gemm_tflops = 0: must be a number > 0"),
        ({"gemm_tflops": True}, "gemm_tflops = True: must be a number > 0"),
        ({"ranks_per_node": 1.5}, "ranks_per_node = 1.5: must be a whole number > 0"),
        ({"name": 7}, "name = 7: must be a word"),
        ({"inside": 370}, "inside: must be a mapping of the keys latency_us, gb_per_s"),
        ({"inside": {"latency_us": -1, "gb_per_s": 1}}, "inside: latency_us = -1: must be a number >= 0"),
        ({"attention_tflops": {"forward": 1}}, "attention_tflops: backward is missing"),
    ],
)
def test_broken_profiles_are_refused(tmp_path: Path, change: dict[str, object], line: str) -> None:
    values = yaml.safe_load(H200.read_text()) | change
    path = tmp_path / "profile.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in values.items() if value is not None}))
    with pytest.raises(PlanError) as error:
        load_hardware(path)
    assert f"{path}: {line}" in str(error.value)


def test_unreadable_profiles_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read: No such file"):
        load_hardware(tmp_path / "none.yaml")
    path = tmp_path / "bad.yaml"
    path.write_text("name: [")
    with pytest.raises(PlanError, match="not a YAML text"):
        load_hardware(path)
    path.write_text("- 1\n")
    with pytest.raises(PlanError, match="must be a mapping of the keys name, "):
        load_hardware(path)


def settings(exchange: str, hardware: Path | None, **sections: dict[str, Any]) -> Config:
    """benchmarks/pipeline.py's 64k-n16."""
    whole = {
        "model": {**MODEL.model_dump(), "vocab_size": 2},
        "parallel": {"pp": 2},
        "pipeline": {
            "slices": 16,
            "vocab_parallel": False,
            "exchange": exchange,
            "hardware": None if hardware is None else str(hardware),
        },
        "data": {"corpus": "unused", "sequence_length": 65536},
        "train": {"steps": 1, "output": "unused", "global_batch": 2, "dtype": "bfloat16"},
    }
    return Config.from_dict({key: value | sections.get(key, {}) for key, value in whole.items()})


def slow(tmp_path: Path) -> Path:
    """The same GPUs over TCP."""
    profile = yaml.safe_load(H200.read_text())
    profile["inside"] = {"latency_us": 100, "gb_per_s": 1}
    path = tmp_path / "slow.yaml"
    path.write_text(yaml.safe_dump(profile))
    return path


@pytest.mark.parametrize("mode", ["pairwise", "balanced"])
def test_a_run_makes_no_loans_where_the_link_is_too_slow(mode: str, tmp_path: Path) -> None:
    assert make_plan(settings(mode, slow(tmp_path))).exchange is None
    fast, blind = (make_plan(settings(mode, hardware)).exchange for hardware in (H200, None))
    assert fast is not None and blind is not None and len(fast.loans) > 0 and len(blind.loans) > 0


def test_prediction_of_a_run_equals_simulate() -> None:
    """docs/exchange.md's row for two H200 at 64K, 370 GB/s; the output layer of two words takes next to nothing."""
    for mode, idle in (("off", 0.067), ("pairwise", 0.052), ("balanced", 0.013)):
        config = settings(mode, H200)
        planned = make_plan(config)
        timeline = predict(config, planned.plan, planned.exchange, load_hardware(H200))
        assert timeline.bubble_fraction == pytest.approx(idle, abs=1e-3), mode


def test_prediction_charges_the_output_layer() -> None:
    """At 128256 words, by hand: three products of 4096 x 4096 x 128256 a slice at 680 TFLOP/s, on the last rank; in
    passes half of it on each."""
    vocabulary = {"model": {"vocab_size": 128256}}
    found = {}
    for vocab in (False, True):
        config = settings("off", H200, **vocabulary, pipeline={"vocab_parallel": vocab})
        planned = make_plan(config)
        timeline = predict(config, planned.plan, planned.exchange, load_hardware(H200))
        found[vocab] = [sum(span.end - span.start for span in spans) for spans in timeline.spans]
    head = 32 * 3 * 2 * 4096 * 4096 * 128256 / 680e12
    assert found[False][1] - found[False][0] == pytest.approx(head, rel=1e-6)
    assert found[True][0] - found[False][0] == pytest.approx(head / 2, rel=1e-6)
