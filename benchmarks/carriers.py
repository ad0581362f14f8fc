"""Pipeline sends over NCCL and out of shared memory: rates alone and beside compute, and what they cost the compute.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.carriers [--results FILE]

Two GPUs send each other slices of one size through the `Transport` that a run would use, both ways at once. `host`:
microseconds in which the host calls for one slice each way. `alone`: GB/s each way. Beside attention (4096 queries, 32K
keys) and beside a GEMM (8192 x 4096 x 14336), as many slices as the link carries meanwhile, or as the host can call for
in 70 % of the time: GB/s, the compute's time over its time alone, and the compute's time lost for each GB sent (and
received). Device time, both alone and together in one run; the median of --repeat runs. Rows in
benchmarks/results/carriers.jsonl.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import record
from slimpipe.config import Config
from slimpipe.kernels.attention import select_backend
from slimpipe.parallel.mesh import prepare_process
from slimpipe.runtime.carrier import Carrier
from slimpipe.runtime.routes import settle
from slimpipe.runtime.traffic import Traffic
from slimpipe.runtime.transport import Receive, Transport
from slimpipe.schedule import Link

RESULTS = Path(__file__).parent / "results" / "carriers.jsonl"
LINKS = [Link("F", 0, 1), Link("B", 1, 0)]
CARRIERS = ("nccl", "symmetric")
WINDOW = 2
SLICES, CALLS = 32, 6
HEAD_START = 40_000_000
"""Cycles for which the device stands still while the host goes ahead."""
COLUMNS = {
    **{"mib": "d", "carrier": "", "alone_gbs": ".0f"},
    **{
        f"{what}_{number}": spec
        for what in ("attention", "gemm")
        for number, spec in (("gbs", ".0f"), ("slower", ".3f"))
    },
}


@dataclass(frozen=True)
class Times:
    """Milliseconds from the common start to the end of each on the device; `host`: to call for the transfers."""

    transfers: float
    compute: float
    host: float


class Bench:
    """Of one rank. `shape` of a slice, bf16."""

    def __init__(self, device: torch.device, transport: Transport, rank: int, shape: tuple[int, ...]) -> None:
        self._transport = transport
        self._outgoing, self._incoming = LINKS if rank == 0 else LINKS[::-1]
        self._sent = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        self._stream = torch.cuda.Stream(device)
        self._posted: deque[Receive] = deque()

    def together(self, slices: int, work: Callable[[], object] | None = None, calls: int = 1) -> Times:
        """`calls` times `slices` slices each way, on a stream of their own, beside one call of `work`."""
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        torch.cuda._sleep(HEAD_START)  # type: ignore[no-untyped-call]
        start, sent, done = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        start.record()
        self._stream.wait_event(start)
        host = 0.0
        for _ in range(calls):
            began = time.perf_counter()
            with torch.cuda.stream(self._stream):
                for _ in range(slices):
                    self._send()
            host += time.perf_counter() - began
            if work is not None:
                work()
        with torch.cuda.stream(self._stream):
            while self._posted:
                self._posted.popleft().wait()
            self._transport.finish()
            sent.record()
        done.record()
        torch.cuda.synchronize()
        return Times(start.elapsed_time(sent), start.elapsed_time(done), 1e3 * host)

    def _send(self) -> None:
        """One slice each way; its receive is posted one slice ahead of the wait for it."""
        self._posted.append(self._transport.post_receive(self._incoming))
        self._transport.send(self._outgoing, self._sent)
        if len(self._posted) > 1:
            self._posted.popleft().wait()


def works(device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    backend = select_backend("cudnn", device, torch.bfloat16, False)
    q, k, v = (
        torch.randn(1, tokens, heads, 128, dtype=torch.bfloat16, device=device)
        for tokens, heads in ((4096, 32), (32768, 8), (32768, 8))
    )
    yield "attention", lambda: backend.forward(q, k, v, causal=False)
    a, b = (torch.randn(*size, dtype=torch.bfloat16, device=device) for size in ((8192, 4096), (4096, 14336)))
    out = torch.empty(8192, 14336, dtype=torch.bfloat16, device=device)
    yield "gemm", lambda: torch.mm(a, b, out=out)


def agreed(value: float) -> float:
    """The longer of the two ranks' times, so that both do the same number of calls."""
    shared = torch.tensor(value, dtype=torch.float64, device="cuda")
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return float(shared)


def measure(bench: Bench, device: torch.device, size: int, repeat: int) -> dict[str, float]:
    """Numbers of one carrier and size in bytes. Collective."""

    def median(which: str, slices: int, work: Callable[[], object] | None, calls: int) -> float:
        return agreed(statistics.median(getattr(bench.together(slices, work, calls), which) for _ in range(repeat)))

    bench.together(4)
    alone, host = (median(which, SLICES, None, 1) / SLICES for which in ("transfers", "host"))
    found = {"host_us": 1e3 * host, "alone_gbs": size / alone / 1e6}
    for name, work in works(device):
        bench.together(1, work, 2)
        plain = median("compute", 0, work, CALLS)
        # No more than the link carries meanwhile, nor than the host can call for without starving the compute.
        slices = max(1, int(min(plain / CALLS / alone, 0.7 * plain / CALLS / host)))
        times = [bench.together(slices, work, CALLS) for _ in range(repeat)]
        beside, transfers = (
            agreed(statistics.median(getattr(found, which) for found in times)) for which in ("compute", "transfers")
        )
        gigabytes = CALLS * slices * size / 1e9
        found |= {
            f"{name}_gbs": gigabytes / max(transfers, beside) * 1e3,
            f"{name}_slower": beside / plain,
            f"{name}_ms_per_gb": (beside - plain) / (gigabytes * min(1.0, beside / transfers)),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--limit", type=int, default=240, help="seconds after which a process ends itself")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.limit, exit=True)
    prepare_process(Config.from_dict(MINIMAL))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timedelta(seconds=90))
    rank = dist.get_rank()
    torch.empty(8 * 2**30, dtype=torch.uint8, device=device)  # no cudaMalloc while a transfer waits
    rows = []
    for mib in options.mib:
        shape = (1, mib * 2**20 // 2 // 4096, 4096)
        for name in CARRIERS:
            carrier = Carrier(device, symmetric="always" if name == "symmetric" else "never")
            traffic = Traffic(settle(carrier, dist.group.WORLD, [(0, 1)]), rank, [0, 1], carrier)
            transport = traffic.transport(LINKS, shape, torch.bfloat16, WINDOW)
            found = measure(Bench(device, transport, rank, shape), device, mib * 2**20, options.repeat)
            rows.append({"mib": mib, "carrier": name, **found} | record.circumstances("benchmarks.carriers, 2 GPUs"))
            if rank == 0:
                record.append(options.results, rows[-1])
                print(rows[-1], flush=True)
    if rank == 0:
        record.table(rows, COLUMNS, "sends between two GPUs, GB/s each way; time of compute beside them over alone")
    dist.destroy_process_group()


MINIMAL = {
    "model": {
        **{"layers": 1, "hidden_size": 128, "heads": 1, "kv_heads": 1, "intermediate_size": 128, "vocab_size": 128},
    },
    "data": {"corpus": "python_stdlib", "sequence_length": 128},
    "train": {"steps": 1, "output": "unused", "global_batch": 1},
    "parallel": {"carrier": "symmetric"},
}
"""`prepare_process` asks for settings; of these only the carrier matters."""


if __name__ == "__main__":
    main()
