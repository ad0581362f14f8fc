"""Checkpoints on GPUs: written beside the next steps they hold the state of their own step, and a run goes on from them
by every bit under `train.deterministic`. Two GPUs run the pipeline over NCCL; with one, only pp = 1 runs."""

from __future__ import annotations

import faulthandler
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from slimpipe.config import Config
from slimpipe.parallel.mesh import prepare_process
from slimpipe.runtime.carrier import Carrier
from slimpipe.runtime.watchdog import Progress
from slimpipe.train import checkpoint, randomness
from slimpipe.train.checkpoint import Keeping, Peers, Saver
from slimpipe.train.session import Session
from tests.gpu.test_gradients import batch, settings

pytestmark = pytest.mark.gpu
SAVED_AT, STEPS = 2, 4


def host_copies(session: Session) -> dict[str, Tensor]:
    return {name: part.tensor.detach().cpu().clone() for name, part in session.state().items()}


def rank_run(rank: int, world: int, store: str, config: Config, run: Path, beside: bool, out: str) -> None:
    """Trains, saving once on the way; then a second session reads that and goes on. Leaves what both found."""
    faulthandler.dump_traceback_later(150, exit=True)
    prepare_process(config)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group(
            "nccl", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=120)
        )
    session = Session(config, Carrier(device))
    saver = Saver(run, Peers.of_job("checkpoint", 120), Keeping(1), 120, Progress())
    if beside:
        saver.go_beside_steps(session.state(), device)
        session.before_update = saver.hold
    losses, there = [], {}
    for step in range(1, STEPS + 1):
        losses.append(session.train_step(*batch()).loss)
        if step == SAVED_AT:
            there = host_copies(session)
            saver.save(session.state(), {"step": step}, step)
            if not beside:
                saver.told(patiently=True)
    saver.finish()
    del session
    torch.cuda.empty_cache()

    again = Session(config, Carrier(device))
    state = again.state()
    checkpoint.read(checkpoint.place(run, SAVED_AT), state)
    again.restored(state)
    read = host_copies(again)
    later = [again.train_step(*batch()).loss for _ in range(STEPS - SAVED_AT)]
    drawn = randomness.capture(device)
    one = torch.rand(4, device=device)
    randomness.restore(drawn, device)
    assert torch.equal(one, torch.rand(4, device=device))
    torch.save({"losses": losses, "later": later, "there": there, "read": read}, f"{out}.{rank}")
    if world > 1:
        dist.destroy_process_group()


@pytest.mark.parametrize(("p", "beside"), [(1, True), (1, False), (2, True), (2, False)])
def test_a_checkpoint_is_of_its_step_and_a_run_goes_on_from_it(p: int, beside: bool, tmp_path: Path) -> None:
    if torch.cuda.device_count() < p:
        pytest.skip(f"needs {p} GPUs, here {torch.cuda.device_count()}")
    config = settings(p, 1, 4, vocab=p > 1, deterministic=True)
    out = tempfile.mktemp(dir=tmp_path)
    context = mp.start_processes(
        rank_run, (p, out + ".store", config, tmp_path, beside, out), nprocs=p, join=False, start_method="spawn"
    )
    while not context.join(timeout=170):
        pass
    for rank in range(p):
        found = torch.load(f"{out}.{rank}")
        assert found["there"].keys() == found["read"].keys() and len(found["there"]) > 20
        for name, tensor in found["there"].items():
            assert torch.equal(found["read"][name], tensor), name
        assert found["later"] == found["losses"][SAVED_AT:]
