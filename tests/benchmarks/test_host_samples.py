"""benchmarks.host_samples: threads are looked at while a function runs, and where they are is counted."""

from __future__ import annotations

import threading

from benchmarks.host_samples import HostSamples


def train_step(samples: HostSamples) -> None:
    while samples.looks < 5:
        sum(range(100))


def other(looked: list[bool]) -> None:
    while not looked:  # an event's own code would count as waiting
        sum(range(100))


def test_lines_of_all_threads_are_counted_while_the_function_runs() -> None:
    looked: list[bool] = []
    with HostSamples("train_step") as samples:
        beside = threading.Thread(target=other, args=(looked,))
        beside.start()
        train_step(samples)
        looked.append(True)
        beside.join()
    place = "tests/benchmarks/test_host_samples.py"
    assert samples.functions[f"{place}:train_step"] >= 5
    assert samples.functions[f"{place}:other"] >= 3
    assert sum(samples.lines.values()) >= 8
    assert f"{place}:train_step" in samples.table()


def test_nothing_is_counted_elsewhere() -> None:
    with HostSamples("a function that never runs") as samples:
        for _ in range(3):
            sum(range(1000))
    assert samples.looks == 0 and not samples.lines
