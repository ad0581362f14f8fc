"""bf16 gradients of the sliced engine on GPUs, against an fp32 reference, beside the plain unsliced bf16 run.

The bounds are the project's: all gradients together at most 1.05 times the plain run's error, any tensor at most 1.3
times. Two GPUs run the pipeline over NCCL; with one, only pp = 1 runs.
"""

from __future__ import annotations

import faulthandler
import gc
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from slimpipe.config import Config
from slimpipe.kernels.attention.flash_package import is_installed
from slimpipe.parallel.mesh import prepare_process
from slimpipe.runtime.carrier import Carrier
from slimpipe.train.session import Session
from tests.support.reference import LlamaSpec, reference_loss_and_grads

pytestmark = pytest.mark.gpu
LENGTH, SEQUENCES, LAYERS = 8192, 2, 4
SPEC = LlamaSpec(
    layers=LAYERS, hidden=1024, heads=8, kv_heads=2, head_dim=128, intermediate=2816, vocab=8192, rope_theta=500000.0
)


def settings(
    p: int, v: int, n: int, vocab: bool = False, recompute: str = "norms", exchange: str = "off", **train: Any
) -> Config:
    # Named, so that what is compared does not hang on what is installed and fastest.
    attention = {} if "attention" in train or "deterministic" in train else {"attention": "cudnn"}
    return Config.from_dict(
        {
            "model": {
                "layers": LAYERS,
                "hidden_size": SPEC.hidden,
                "heads": SPEC.heads,
                "kv_heads": SPEC.kv_heads,
                "intermediate_size": SPEC.intermediate,
                "vocab_size": SPEC.vocab,
                "rope_theta": SPEC.rope_theta,
            },
            "parallel": {"pp": p},
            "pipeline": {"slices": n, "virtual_stages": v, "vocab_parallel": vocab, "exchange": exchange},
            "memory": {"recompute": recompute},
            "data": {"corpus": "python_stdlib", "sequence_length": LENGTH},
            "train": {
                "steps": 3,
                "output": "unused",
                "global_batch": SEQUENCES,
                "dtype": "bfloat16",
                **attention,
                **train,
            },
        }
    )


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(SPEC.vocab, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    labels = tokens[:, 1:].clone()
    labels[0, 1000:3000] = -100
    return tokens[:, :-1], labels


def rank_gradients(rank: int, world: int, store: str, configs: list[Config], out: str) -> None:
    """One rank over NCCL; leaves its loss and gradients under each config in a file."""
    prepare_process(configs[0])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group(
            "nccl", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=120)
        )
    for number, config in enumerate(configs):
        faulthandler.dump_traceback_later(150, exit=True)
        session = Session(config, Carrier(device))
        loss = session.step_gradients(*batch())
        gradients = {name: gradient.cpu() for name, gradient in session.gradients().items()}
        weights = {name: weight.cpu() for name, weight in session.weights().items()}
        found = {"loss": loss, "gradients": gradients, "weights": weights, "cut": list(session.shards)}
        torch.save(found, f"{out}.{number}.{rank}")
        del session
        gc.collect()
    if world > 1:
        dist.destroy_process_group()


def run_each(configs: list[Config], folder: Path) -> list[dict[str, Any]]:
    """Loss, gradients and weights of the whole model under each config, one after the other in the same processes, as
    many as the layout needs: starting them and compiling takes most of the time."""
    world = configs[0].parallel.pp
    out = tempfile.mktemp(dir=folder)
    context = mp.start_processes(
        rank_gradients, (world, out + ".store", configs, out), nprocs=world, join=False, start_method="spawn"
    )
    while not context.join(timeout=170):
        pass
    return [_whole([torch.load(f"{out}.{number}.{rank}") for rank in range(world)]) for number in range(len(configs))]


def _whole(parts: list[dict[str, Any]]) -> dict[str, Any]:
    whole: dict[str, Any] = {"loss": parts[0]["loss"], "gradients": {}, "weights": {}}
    for part in parts:
        for key in ("gradients", "weights"):
            for name, tensor in part[key].items():
                rows = [whole[key][name]] if name in part["cut"] and name in whole[key] else []
                whole[key][name] = torch.cat([*rows, tensor])
    return whole


def run(config: Config, folder: Path) -> dict[str, Any]:
    return run_each([config], folder)[0]


CASES = [
    (1, 1, 16, False, "cudnn"),
    (1, 1, 64, False, "cudnn"),
    (1, 1, 16, False, "flash"),
    (1, 1, 16, False, "flash4"),
    (2, 1, 16, False, "cudnn"),
    (2, 2, 64, True, "cudnn"),
]
Layout = tuple[int, int, int, bool, str]


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout], dict[str, Any]]:
    """What a layout gives; all those of as many ranks run in one job."""

    @cache
    def all_of(p: int) -> dict[Layout, dict[str, Any]]:
        cases = [case for case in CASES if case[0] == p and _installed(case[-1])]
        configs = [settings(*case[:4], attention=case[4]) for case in cases]
        return dict(zip(cases, run_each(configs, tmp_path_factory.mktemp(f"p{p}")), strict=True))

    return lambda layout: all_of(layout[0])[layout]


def _installed(attention: str) -> bool:
    return attention != "flash4" or is_installed("flash4")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The unsliced bf16 run, and the fp32 reference on its weights."""
    found = run(settings(1, 1, 1), tmp_path_factory.mktemp("plain"))
    weights = {name: weight.float().cuda() for name, weight in found["weights"].items()}
    tokens, labels = (data.cuda() for data in batch())
    with torch.device("cuda"):
        loss, gradients = reference_loss_and_grads(SPEC, weights, tokens, labels)
    found["reference"] = {name: gradient.cpu() for name, gradient in gradients.items()}
    found["reference_loss"] = float(loss)
    return found


def errors(found: dict[str, Tensor], reference: dict[str, Tensor]) -> tuple[float, dict[str, float]]:
    """(relative L2 error of all gradients together, by tensor)."""
    difference = {name: float((found[name].double() - reference[name].double()).norm()) for name in reference}
    size = {name: float(reference[name].double().norm()) for name in reference}
    together = sum(d * d for d in difference.values()) ** 0.5 / sum(s * s for s in size.values()) ** 0.5
    return together, {name: difference[name] / size[name] for name in reference}


@pytest.mark.parametrize("layout", CASES, ids=lambda case: f"p{case[0]}-v{case[1]}-n{case[2]}-{case[4]}")
def test_bf16_gradients_lose_nothing_to_slicing(
    layout: Layout, layouts: Callable[[Layout], dict[str, Any]], plain: dict[str, Any]
) -> None:
    p, v, n, vocab, attention = layout
    if torch.cuda.device_count() < p:
        pytest.skip(f"needs {p} GPUs, here {torch.cuda.device_count()}")
    if not _installed(attention):
        pytest.skip("flash-attn-4 is not installed")
    found = layouts(layout)
    together, by_tensor = errors(found["gradients"], plain["reference"])
    plain_together, plain_by_tensor = errors(plain["gradients"], plain["reference"])
    ratios = {name: by_tensor[name] / plain_by_tensor[name] for name in by_tensor}
    worst = max(ratios, key=lambda name: ratios[name])
    print(
        f"\np={p} v={v} n={n} vocab_parallel={vocab} {attention}: loss {found['loss']:.6f} "
        f"(plain {plain['loss']:.6f}, fp32 {plain['reference_loss']:.6f}); "
        f"error together {together:.3e} = {together / plain_together:.3f} x plain; "
        f"worst tensor {worst} {ratios[worst]:.3f} x plain"
    )
    assert set(found["gradients"]) == set(plain["reference"])
    assert abs(found["loss"] - plain["reference_loss"]) <= 2e-3 * plain["reference_loss"]
    assert together <= 1.05 * plain_together
    assert ratios[worst] <= 1.3


def test_deterministic_runs_are_equal_bit_for_bit(tmp_path: Path) -> None:
    first, second = (run(settings(1, 1, 4, deterministic=True), tmp_path) for _ in range(2))
    assert first["loss"] == second["loss"]
    for name, gradient in first["gradients"].items():
        assert torch.equal(gradient, second["gradients"][name]), name
