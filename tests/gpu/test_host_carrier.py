"""Several processes on one GPU, with transfers through host memory: longer pipelines than there are GPUs.

bf16 gradients with the exchange's modes agree with those of no exchange, p = 4 and 8, against the fp32 reference.
"""

from __future__ import annotations

import faulthandler
import tempfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from slimpipe.config import Config
from slimpipe.parallel.mesh import pick_carrier, prepare_process
from slimpipe.train.session import Session
from tests.gpu.test_gradients import SPEC, batch, errors, settings
from tests.support.reference import reference_loss_and_grads

pytestmark = pytest.mark.gpu
SPEC8 = replace(SPEC, layers=8)
LEAST = {("pairwise", 4): 25, ("balanced", 4): 75, ("pairwise", 8): 100, ("balanced", 8): 300}


def layouts(p: int, mode: str) -> Config:
    values = settings(1, 1, 2 * p).model_dump()
    values["model"] |= {"layers": SPEC8.layers}
    values["parallel"] |= {"pp": p, "carrier": "host"}
    values["pipeline"] |= {"vocab_parallel": True, "exchange": mode}
    return Config.from_dict(values)


def rank_modes(rank: int, p: int, store: str, out: str) -> None:
    """One rank: the three modes one after the other; leaves losses, gradients, weights and loans in a file."""
    faulthandler.dump_traceback_later(140, exit=True)
    config = layouts(p, "off")
    prepare_process(config)
    carrier = pick_carrier(config, rank)
    torch.cuda.set_device(carrier.device)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, p), rank=rank, world_size=p, timeout=timedelta(seconds=120)
    )
    found: dict[str, Any] = {}
    for mode in ("off", "pairwise", "balanced"):
        session = Session(layouts(p, mode), carrier)
        loss = session.step_gradients(*batch())
        gradients = {name: gradient.cpu() for name, gradient in session.gradients().items()}
        loans = 0 if session.exchange is None else len(session.exchange.loans)
        weights = {name: weight.cpu() for name, weight in session.weights().items()} if mode == "off" else {}
        found[mode] = {
            "loss": loss,
            "gradients": gradients,
            "weights": weights,
            "loans": loans,
            "cut": list(session.shards),
        }
        del session
        torch.cuda.empty_cache()
    torch.save(found, f"{out}.{rank}")
    dist.destroy_process_group()


@pytest.mark.parametrize("p", [4, 8])
def test_longer_pipelines_on_one_gpu(p: int, tmp_path: Path) -> None:
    out = tempfile.mktemp(dir=tmp_path)
    context = mp.start_processes(rank_modes, (p, out + ".store", out), nprocs=p, join=False, start_method="spawn")
    while not context.join(timeout=150):
        pass
    parts = [torch.load(f"{out}.{rank}") for rank in range(p)]
    weights = joined(parts, "off", "weights")
    tokens, labels = (data.cuda() for data in batch())
    with torch.device("cuda"):
        _, reference = reference_loss_and_grads(
            SPEC8, {name: weight.float().cuda() for name, weight in weights.items()}, tokens, labels
        )
    exact = {name: gradient.cpu() for name, gradient in reference.items()}
    plain, plain_by_tensor = errors(joined(parts, "off", "gradients"), exact)
    for mode in ("pairwise", "balanced"):
        together, by_tensor = errors(joined(parts, mode, "gradients"), exact)
        worst = max(by_tensor[name] / plain_by_tensor[name] for name in exact)
        off, lent = parts[0]["off"], parts[0][mode]
        print(
            f"\np={p} {mode}: {lent['loans']} loans, loss {lent['loss']:.6f} (off {off['loss']:.6f}); "
            f"error together {together:.3e} = {together / plain:.3f} x off, worst tensor {worst:.3f} x off"
        )
        assert lent["loans"] >= LEAST[mode, p]
        assert together <= 1.05 * plain and worst <= 1.3
        assert abs(lent["loss"] - off["loss"]) <= 1e-4 * off["loss"]


def joined(parts: list[dict[str, Any]], mode: str, what: str) -> dict[str, torch.Tensor]:
    """All ranks' tensors; of those in rows, the rows one under the other."""
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, tensor in part[mode][what].items():
            cut = name in part[mode]["cut"] and name in found
            found[name] = torch.cat([found[name], tensor]) if cut else tensor
    return found
