"""Streams of a CUDA device: one stream a direction, the compute stream looked up at each use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

PROBE_BYTES = 64 << 20


class CudaStreams:
    def __init__(self, device: torch.device) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.device = torch.device("cuda", index)
        self.out_stream = torch.cuda.Stream(self.device)
        self.in_stream = torch.cuda.Stream(self.device)
        self._seen: dict[int, torch.cuda.Stream] = {}
        self._rates: tuple[float, float] | None = None

    def copy_out(self, source: Tensor, host: Tensor, after: Sequence[torch.cuda.Event]) -> torch.cuda.Event:
        return self._copy(self.out_stream, [(source, host)], after)

    def copy_in(self, host: Tensor, target: Tensor, after: Sequence[torch.cuda.Event]) -> torch.cuda.Event:
        return self._copy(self.in_stream, [(host, target)], after)

    def copies(
        self, pairs: Sequence[tuple[Tensor, Tensor]], inward: bool, after: Sequence[torch.cuda.Event]
    ) -> torch.cuda.Event:
        return self._copy(self.in_stream if inward else self.out_stream, pairs, after)

    def _copy(
        self, stream: torch.cuda.Stream, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[torch.cuda.Event]
    ) -> torch.cuda.Event:
        # Looked up before the copy stream's own block, inside of which it would be the copy stream.
        stream.wait_stream(self.current())
        for event in after:
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        self.current().wait_event(event)

    def wait_everywhere(self, event: torch.cuda.Event) -> None:
        self.current()
        for stream in self._seen.values():
            stream.wait_event(event)

    def done(self, event: torch.cuda.Event) -> bool:
        return event.query()

    def synchronize(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def current(self) -> torch.cuda.Stream:
        stream = torch.cuda.current_stream(self.device)
        self._seen.setdefault(stream.cuda_stream, stream)
        return stream

    def use_here(self, tensor: Tensor, allocated_on: Any) -> None:
        current = self.current()
        if current.cuda_stream != allocated_on.cuda_stream:
            # The block will go back to another stream's pool, which knows nothing of what is queued here.
            tensor.record_stream(current)

    def host_memory(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def watch(self, storage: torch.UntypedStorage) -> None:
        pass

    def aliases(self, storage: int) -> int:
        return 0

    def memory_in_use(self) -> int:
        return int(self._allocated()["current"])

    def peak_memory(self, restart: bool = False) -> int:
        peak = int(self._allocated()["peak"])
        if restart:
            torch.cuda.reset_peak_memory_stats(self.device)
        return peak

    def _allocated(self) -> Any:
        # memory_allocated() flattens and sorts some hundred counters on each call.
        return torch.cuda.memory_stats_as_nested_dict(self.device)["allocated_bytes"]["all"]

    def memory_size(self) -> int:
        return int(torch.cuda.get_device_properties(self.device).total_memory)

    def free_cached(self) -> None:
        torch.cuda.empty_cache()

    def at_operator(self, index: int) -> None:
        pass

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.current())
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def rates(self) -> tuple[float, float]:
        """Measured once, both directions at once; takes some milliseconds and PROBE_BYTES on each side."""
        if self._rates is None:
            self._rates = self._measure()
        return self._rates

    def _measure(self) -> tuple[float, float]:
        device = [self.empty(PROBE_BYTES) for _ in range(2)]
        host = [self.host_memory(PROBE_BYTES) for _ in range(2)]
        directions = ((self.out_stream, device[0], host[0]), (self.in_stream, host[1], device[1]))
        times: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        for _ in range(2):  # the first round warms up
            torch.cuda.synchronize(self.device)
            times = []
            for stream, source, target in directions:
                with torch.cuda.stream(stream):
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record(stream)
                    for _ in range(4):
                        target.copy_(source, non_blocking=True)
                    end.record(stream)
                times.append((begin, end))
            torch.cuda.synchronize(self.device)
        out, into = (4 * PROBE_BYTES / (begin.elapsed_time(end) / 1e3) for begin, end in times)
        return out, into
