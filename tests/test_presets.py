"""The files in configs/: they load, fit the devices they name, and have the model they are called by."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
import torch

from slimpipe.config import load_config
from slimpipe.models.contract import build_model
from slimpipe.plan.footprint import Footprints
from slimpipe.plan.memory import output_chunk
from slimpipe.schedule import place_layers
from slimpipe.schedule.formulas import bubble_fraction
from slimpipe.train.forecast import Forecast, rank_parameters
from slimpipe.train.planning import by_operations, make_evaluation_plan, make_plan

CONFIGS = Path(__file__).parents[1] / "configs"
GIB = 2**30
# Of NVIDIA's: "80 GB" are 79.1 GiB for programs, 143,771 MiB of an H200 are 140.4.
PRESETS = {
    # name: (parameters, as published with the weights; GiB of a device; GiB predicted, as the file says)
    "llama3_8b": (8_030_261_248, 79.1, 50),
    "llama3_70b": (70_553_706_496, 140.4, 110),
    "llama_16l": (None, 140.4, None),
}


def test_every_preset_is_tested() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {*PRESETS, "quickstart"}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_plans_simulates_and_fits(name: str) -> None:
    published, device, predicted = PRESETS[name]
    path = CONFIGS / f"{name}.yaml"
    # More microbatches change neither what a rank holds nor the order.
    config = load_config(path, ["train.global_batch=2"])
    if published is not None:
        assert sum(parameter.numel() for parameter in build_model(config).parameters()) == published

    found = make_plan(config)
    shape = config.shape
    timeline = by_operations(config, found)
    assert timeline.bubble_fraction < 2 * float(bubble_fraction("slimpipe", shape)) + 0.15
    evaluation = make_evaluation_plan(config, found, lambda what: None)
    assert evaluation.peaks.kv_slots == ((shape.n,) * shape.v,) * shape.p

    placement = place_layers(config.model.layers, shape.stages, config.pipeline.layers_per_stage)
    parameters = rank_parameters(build_model(config), placement, shape, config.vocab_parallel)
    chunk = output_chunk(config, round(device * GIB) - max(parameters) * 6)
    ranks = Footprints(
        config, found.plan, found.peaks, found.exchange, placement, parameters, chunk, found.send_window, fused=True
    ).ranks
    fullest = max(rank.total for rank in ranks) / GIB
    assert fullest < 0.9 * device
    if predicted is not None:
        assert fullest == pytest.approx(predicted, abs=1)
        assert f": {predicted} GiB." in path.read_text(encoding="utf-8").replace("\n# ", " ")


def test_a_preset_says_its_tokens_a_step() -> None:
    for name in ("llama3_8b", "llama3_70b"):
        config = load_config(CONFIGS / f"{name}.yaml")
        assert config.train.global_batch * config.data.sequence_length == 1_048_576
        assert Fraction(config.model.layers, config.parallel.pp).denominator == 1


def test_the_preset_for_two_gpus_says_its_memory() -> None:
    """With the memory that its ranks share, and with the output layer of 128,256 words."""
    text = (CONFIGS / "llama_16l.yaml").read_text(encoding="utf-8").replace("\n# ", " ")

    def fullest(*overrides: str) -> float:
        config = load_config(CONFIGS / "llama_16l.yaml", overrides)
        forecast = Forecast(config, make_plan(config), torch.device("cuda", 0), round(140.4 * GIB))
        return max(rank.total for rank in forecast.memory) / GIB

    more, words = fullest(), fullest("model.vocab_size=128256")
    assert f"takes {more:.0f} GiB as predicted, and {words:.0f} with those" in text
    lean = ["pipeline.slices=16", "pipeline.virtual_stages=1", "pipeline.exchange=off", "memory.recompute=norms"]
    assert fullest(*lean) == pytest.approx(more - 30, abs=1)
