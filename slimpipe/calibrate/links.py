"""Links between two ranks: latency, and what each way carries while both compute and send (an H200's: docs/h200.md)."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from slimpipe.calibrate.compute import Bench
from slimpipe.runtime.carrier import Carrier
from slimpipe.schedule import Rate

LARGE = 64 * 2**20
SMALL = 4096


def link_rate(
    bench: Bench, carrier: Carrier, group: dist.ProcessGroup, peer: int, first: bool, large: int = LARGE
) -> Rate:
    """Between this rank and `peer` (global rank), both of them in `group`, both calling. `first`: of the two.

    Large tensors go both ways at once beside a product of matrices that takes no less time, as they do in a run.
    Latency is half of a small tensor's way there and back.
    """
    there, back = (torch.zeros(large, dtype=torch.uint8, device=carrier.memory) for _ in range(2))
    width = 2048 if bench.device.type == "cuda" else 256
    a = bench.randn(width, width)

    def both_ways(products: int) -> None:
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, there, peer, group), dist.P2POp(dist.irecv, back, peer, group)]
        )
        for _ in range(products):
            a @ a
        for work in works:
            work.wait()

    # Both ranks must do the same number of calls: they agree on each time, and so on every count.
    alone = _agreed(_calls(bench, lambda: both_ways(0), 5), carrier, group)
    one = _agreed(_calls(bench, lambda: a @ a, 20), carrier, group)
    products = max(1, int(0.9 * alone / one))
    both = _agreed(_calls(bench, lambda: both_ways(products), 10), carrier, group)
    small = torch.zeros(SMALL, dtype=torch.uint8, device=carrier.memory)

    def there_and_back() -> None:
        for sends in (first, not first):
            if sends:
                dist.send(small, peer, group=group)
            else:
                dist.recv(small, peer, group=group)

    latency = _agreed(_calls(bench, there_and_back, 20), carrier, group) / 2
    return Rate(latency, large / both)


def _calls(bench: Bench, work: Callable[[], object], calls: int) -> float:
    """Seconds a call, over a fixed number of calls after a first."""
    work()
    _synchronize(bench.device)
    started = time.perf_counter()
    for _ in range(calls):
        work()
    _synchronize(bench.device)
    return (time.perf_counter() - started) / calls


def _agreed(value: float, carrier: Carrier, group: dist.ProcessGroup) -> float:
    """The longer of the two ranks' times."""
    shared = torch.tensor(value, dtype=torch.float64, device=carrier.memory)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
    return float(shared)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
