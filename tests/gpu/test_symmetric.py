"""Transfers out of memory that GPUs of a node share: values under delays by chance, gradients bitwise those over NCCL,
and a peer that is gone is named.

Needs two GPUs that reach each other's memory, and four for the longer half. Each process ends itself by a time limit.
"""

from __future__ import annotations

import faulthandler
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from slimpipe.config import Config
from slimpipe.parallel.mesh import pick_carrier, prepare_process
from slimpipe.runtime.carrier import Carrier
from slimpipe.runtime.collectives import Pending
from slimpipe.runtime.routes import settle
from slimpipe.runtime.symmetric.collectives import Sizes
from slimpipe.runtime.symmetric.cuda import CudaArena, CudaDevice
from slimpipe.runtime.symmetric.exchange import SymmetricExchange
from slimpipe.runtime.traffic import Traffic
from slimpipe.runtime.watchdog import Progress, Watchdog
from slimpipe.schedule import Link
from slimpipe.train.session import Session
from tests.gpu.test_gradients import batch, settings

pytestmark = pytest.mark.gpu
LIMIT = 150
"""Seconds a process may take."""
SHAPE = (1, 1024, 1024)
SLICES, WINDOW, AHEAD = 40, 2, 2


def start(work: Callable[..., None], world: int, folder: Path, *arguments: Any, loading: str = "EAGER") -> None:
    """Runs `work(rank, world, *arguments)` on `world` GPUs, or skips where there are fewer.

    `loading`: of kernels. One that is loaded at its first use may wait for the device, and so for a stream that waits
    for a peer; a `Session` warms up before that can be.
    """
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs, here {torch.cuda.device_count()}")
    store = tempfile.mktemp(dir=folder)
    context = mp.start_processes(
        _process, (world, store, loading, work, arguments), nprocs=world, join=False, start_method="spawn"
    )
    end = time.monotonic() + LIMIT + 30
    while not context.join(timeout=5):
        if time.monotonic() > end:
            for process in context.processes:
                process.kill()
            pytest.fail("processes outlast their own time limit")


def _process(
    rank: int, world: int, store: str, loading: str, work: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    os.environ["CUDA_MODULE_LOADING"] = loading
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    prepare_process(with_carrier(1, 1, 1, False, "off", "symmetric"))
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=90)
    )
    # Nothing below may ask the driver for memory while a stream waits for a peer.
    torch.empty(4 * 2**30, dtype=torch.uint8, device=device)
    work(rank, world, *arguments)
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


def traffic_of(rank: int, world: int) -> Traffic:
    carrier = Carrier(torch.device("cuda", rank), symmetric="always")
    pairs = [(one, other) for one in range(world) for other in range(one)]
    return Traffic(settle(carrier, dist.group.WORLD, pairs), rank, list(range(world)), carrier)


def value(index: int, place: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    """Different in every element and slice; whole numbers that bf16 holds."""
    numbers = torch.arange(torch.Size(shape).numel(), device="cuda").view(shape)
    return ((numbers * 7 + index * 31 + place * 101) % 256).bfloat16()


def late(some: random.Random) -> None:
    """The compute stream is late by up to 2 ms, half of the time."""
    if some.random() < 0.5:
        torch.cuda._sleep(int(some.random() * 3_600_000))


@pytest.mark.parametrize("world", [2, 4])
def test_everything_arrives_under_delays(world: int, tmp_path: Path) -> None:
    """The parts alone, then sends, then the exchange's batches: in one start, for that takes the longest."""
    start(rank_transfers, world, tmp_path)


def rank_transfers(rank: int, world: int) -> None:
    for step, work in {
        "memory and counters": lambda: rank_parts(rank, world),
        "sends": lambda: rank_sends(rank, world),
        "exchange, tensors larger than their ring": lambda: rank_exchange(rank, world, 64 * 2**10),
        "exchange": lambda: rank_exchange(rank, world, 64 * 2**20),
        "collectives": lambda: rank_collectives(rank, world),
    }.items():
        began = time.monotonic()
        work()
        torch.cuda.synchronize()
        dist.barrier()
        if rank == 0:
            print(f"{world} GPUs, {step}: {time.monotonic() - began:.1f} s", flush=True)


def rank_parts(rank: int, world: int) -> None:
    """Each rank reads each other's memory once its counter says so."""
    where = torch.device("cuda", rank)
    device = CudaDevice(where)
    arena = CudaArena(dist.group.WORLD, range(world), 2**20, where)  # type: ignore[arg-type]
    counters = [arena.bytes(owner, 0, 4 * world).view(torch.int32) for owner in range(world)]
    own = arena.bytes(rank, 4096, 4096)
    side = device.side()
    found = [torch.zeros(4096, dtype=torch.uint8, device=where) for _ in range(world)]
    own.fill_(0)
    for peer in range(world):
        side.wait_until(counters[rank][peer : peer + 1], 1)
        side.copy(found[peer], arena.bytes(peer, 4096, 4096))
    torch.cuda._sleep(20_000_000)
    own.fill_(rank + 1)
    for peer in range(world):
        device.current().set(counters[peer][rank : rank + 1], 1)
    torch.cuda.synchronize()
    assert [int(tensor.unique()) for tensor in found] == [peer + 1 for peer in range(world)]
    # Waits are for so much or more, and wrap at 32 bits.
    word = arena.bytes(rank, 8192, 4).view(torch.int32)
    for written, awaited in ((2**32 - 1, 2**32 - 2), (3, 2**32 - 1), (3, 3)):
        device.current().set(word, written)
        device.current().wait_until(word, awaited)
    torch.cuda.synchronize()
    assert int(word) == 3


def rank_sends(rank: int, world: int) -> None:
    """Every link of a ring of ranks, both ways, more slices than the window, receives posted ahead of their use."""
    links = [Link("F", src, (src + 1) % world) for src in range(world)]
    links += [Link("B", link.dst, link.src) for link in links]
    traffic = traffic_of(rank, world)
    transport = traffic.transport(links, SHAPE, torch.bfloat16, WINDOW)
    wrong = torch.zeros((), device="cuda")
    some = random.Random(rank)
    posted: dict[Link, list[Any]] = {link: [] for link in links}
    for index in range(SLICES + AHEAD):
        for place, link in enumerate(links):
            if index < SLICES and link.dst == rank:
                posted[link].append(transport.post_receive(link))
            if index < SLICES and link.src == rank:
                late(some)
                tensor = value(index, place)
                transport.send(link, tensor)
                tensor.fill_(-1)
        for place, link in enumerate(links):
            if index >= AHEAD and link.dst == rank:
                late(some)
                wrong += (posted[link].pop(0).wait() != value(index - AHEAD, place)).sum()
    transport.finish()
    torch.cuda.synchronize()
    assert int(wrong) == 0, f"rank {rank}: {int(wrong)} wrong elements"
    assert traffic.waits() is None


def rank_exchange(rank: int, world: int, least: int) -> None:
    """Random batches; with 64 KiB most tensors are larger than their ring."""
    where, plan = torch.device("cuda", rank), random.Random(17)
    device = CudaDevice(where)
    exchange = SymmetricExchange(
        range(world),
        rank,
        device,
        lambda size: CudaArena(dist.group.WORLD, range(world), size, where),  # type: ignore[arg-type]
        {},
        least,
    )
    wrong = torch.zeros((), device="cuda")
    buffers: dict[int, Tensor] = {place: torch.empty(2**21, dtype=torch.bfloat16, device=where) for place in range(32)}
    some = random.Random(rank)
    for index in range(12):
        transfers = [(*plan.sample(range(world), 2), plan.randint(1, 2**20)) for _ in range(plan.randint(1, 6))]
        sends, receives, expected = [], [], []
        late(some)
        for place, (src, dst, size) in enumerate(transfers):
            if src == rank:
                sends.append((value(index, place, (size,)), dst))
            if dst == rank:
                out = buffers[index % 2 * 16 + place][:size]
                receives.append((out, src))
                expected.append((out, place))
        under_way = exchange.post(sends, receives)
        for tensor, _ in sends:
            tensor.fill_(-1)
        late(some)
        under_way.wait()
        for out, place in expected:
            wrong += (out != value(index, place, tuple(out.shape))).sum()
    assert under_way.follow()
    torch.cuda.synchronize()
    assert int(wrong) == 0, f"rank {rank}: {int(wrong)} wrong elements"
    assert list(exchange.waits()) == []


def rank_collectives(rank: int, world: int) -> None:
    """Each kind in turn, more than a ring holds, used two operations later, under delays."""
    hidden = torch.Size(SHAPE).numel()
    sizes = Sizes(2 * hidden, 4 * hidden, statistics=12 * SHAPE[1])
    collectives = traffic_of(rank, world).collectives(sizes)
    first, last, some = 0, world - 1, random.Random(rank)
    wrong = torch.zeros((), device="cuda")
    posted: list[tuple[Pending, Tensor | None]] = []
    for index in range(SLICES):
        late(some)
        # Whole numbers, whose sum is exact in any order; bf16 holds them up to 256.
        mine, parts = value(index, rank), [value(index, other) for other in range(world)]
        fifth = index % 5
        if fifth == 0:
            posted.append((collectives.broadcast("output", mine.clone(), last), parts[last]))
        elif fifth == 1:
            posted.append((collectives.broadcast("embedding", mine.clone(), first), parts[first]))
        elif fifth == 2:
            wide = [part.float() for part in parts]
            posted.append((collectives.reduce("output", wide[rank].clone(), last), sum(wide) if rank == last else None))  # type: ignore[arg-type]
        elif fifth == 3:
            small = [part // (2 * world) for part in parts]
            found = collectives.reduce("embedding", small[rank].clone(), first)
            posted.append((found, sum(small) if rank == first else None))  # type: ignore[arg-type]
        else:
            rows = [part.flatten()[: 3 * SHAPE[1]].float().view(3, -1) for part in parts]
            posted.append((collectives.gather("output", rows[rank]), torch.stack(rows)))
        if len(posted) > 2 or index == SLICES - 1:
            for pending, expected in posted[: 1 if index < SLICES - 1 else None]:
                came = pending.wait()
                wrong += 0 if expected is None else (came != expected).sum()
                came.fill_(-1)
            del posted[0]
    torch.cuda.synchronize()
    assert int(wrong) == 0, f"rank {rank}: {int(wrong)} wrong elements"


CASES = [
    (2, 2, 16, True, "off", "nccl"),
    (2, 1, 16, True, "balanced", "symmetric"),
    (4, 1, 16, False, "off", "nccl"),
    (4, 1, 16, True, "balanced", "nccl"),
    (4, 1, 16, True, "balanced", "symmetric"),
]


@pytest.mark.parametrize(("p", "v", "n", "vocab", "exchange", "collectives"), CASES)
def test_gradients_are_bitwise_those_over_nccl(
    p: int, v: int, n: int, vocab: bool, exchange: str, collectives: str, tmp_path: Path
) -> None:
    """Under `train.deterministic`; two steps, so that rings go on from one to the next. To rounding where more than two
    parts are added up, in another order than NCCL's."""
    over_nccl = with_carrier(p, v, n, vocab, exchange, "nccl")
    shared = with_carrier(p, v, n, vocab, exchange, "symmetric", collectives)
    start(rank_gradients, p, tmp_path, over_nccl, shared, p > 2 and collectives == "symmetric", loading="LAZY")


def with_carrier(p: int, v: int, n: int, vocab: bool, exchange: str, carrier: str, collectives: str = "auto") -> Config:
    values = settings(p, v, n, vocab, exchange=exchange, deterministic=True).model_dump()
    values["parallel"] |= {"carrier": carrier, "collectives": collectives}
    return Config.from_dict(values)


def rank_gradients(rank: int, world: int, over_nccl: Config, shared: Config, rounded: bool) -> None:
    theirs, ours = steps(rank, over_nccl), steps(rank, shared)
    assert rounded or ours["losses"] == theirs["losses"]
    for name, gradient in theirs["gradients"].items():
        # bf16 behind the sum: another last bit there is a rounding of a bf16 activation.
        bound = 1e-2 if rounded else 0.0
        assert float((ours["gradients"][name] - gradient).norm()) <= bound * float(gradient.norm()), name


def steps(rank: int, config: Config) -> dict[str, Any]:
    prepare_process(config)
    session = Session(config, pick_carrier(config, rank))
    loans = 0 if session.exchange is None else len(session.exchange.loans)
    assert session.carriers is not None
    assert ("symmetric memory" in session.carriers) == (config.parallel.carrier == "symmetric")
    assert (loans > 0) == (config.pipeline.exchange != "off")
    losses = [session.step_gradients(*batch()) for _ in range(2)]
    if rank == 0:
        print(f"{session.carriers}: {loans} loans, losses {losses}", flush=True)
    return {"losses": losses, "gradients": {name: found.clone() for name, found in session.gradients().items()}}


def test_a_peer_that_is_gone_is_named(tmp_path: Path) -> None:
    """Rank 1 ends in mid-step; rank 0's device waits for it for ever, and its watchdog says for whom."""
    said = tmp_path / "said"
    with pytest.raises(mp.ProcessExitedException):
        start(rank_bereaved, 2, tmp_path, str(said))
    assert "rank 0: waiting for the device, unchanged for" in said.read_text()
    assert "the device is at waiting for rank 1 to send on link F 1>0" in said.read_text()


def rank_bereaved(rank: int, world: int, said: str) -> None:
    traffic = traffic_of(rank, world)
    links = [Link("F", 1, 0)]
    transport = traffic.transport(links, SHAPE, torch.bfloat16, WINDOW)
    dist.barrier()
    torch.cuda.synchronize()
    if rank == 1:
        os._exit(0)  # as it were well: else the other process would be ended too
    sys.stderr = open(said, "w", encoding="utf-8")  # noqa: SIM115
    progress = Progress()

    def device_doing() -> str | None:
        waits = traffic.waits()
        return None if waits is None else f"waiting {waits}"

    Watchdog(progress, 3.0, rank, 1, None, device_doing)
    transport.post_receive(links[0]).wait()
    progress.now("waiting for the device")
    torch.cuda.synchronize()
