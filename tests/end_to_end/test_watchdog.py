"""The watchdog by itself: when it speaks, what it says of ranks that answer and that do not, and that it leaves."""

from __future__ import annotations

import contextlib
import io
import queue
import re
import threading
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from slimpipe.runtime.watchdog import Progress, Watchdog
from tests.support.pool import Pool

SECONDS = 0.4
PATIENCE = 60.0  # a hard limit against hangs, nothing that is measured


class Left:
    """Stands in for the end of the process: takes the exit code."""

    def __init__(self) -> None:
        self._codes: queue.Queue[int] = queue.Queue()

    def __call__(self, code: int) -> None:
        self._codes.put(code)

    def wait(self) -> int:
        return self._codes.get(timeout=PATIENCE)

    def happened(self) -> bool:
        return not self._codes.empty()


@pytest.fixture
def left() -> Left:
    return Left()


def table(seconds: float, *rows: str) -> str:
    return (
        rf"watchdog: no progress for {seconds:g} s \(train\.watchdog_seconds\); every rank's current action:\n"
        + "".join(rf"  {row}\n" for row in rows)
    )


# ---- one process ----


def test_alone_it_names_the_action_and_leaves(left: Left, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    Watchdog(progress, SECONDS, 0, 1, None, lambda: None, left)
    progress.now("F0.1@0")
    assert left.wait() == 1
    text = capsys.readouterr().err
    assert re.search(table(SECONDS, r"rank 0: F0\.1@0, unchanged for \S+ s"), text), text
    # The stack of the thread that hangs: this one, waiting for the watchdog.
    assert text.startswith("watchdog: where rank 0 stands:\n") and "in test_alone_it_names_the_action" in text


def test_it_names_what_the_device_has_not_finished(left: Left, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    progress.now("waiting for the device")
    Watchdog(progress, SECONDS, 0, 1, None, lambda: "B1.0@0", left)
    left.wait()
    row = r"rank 0: waiting for the device, unchanged for \S+ s; the device is at B1\.0@0"
    assert re.search(table(SECONDS, row), capsys.readouterr().err)


def test_it_says_nothing_while_there_is_progress(left: Left, capsys: pytest.CaptureFixture[str]) -> None:
    """Over more than its seconds; generous ones, for the machine may be busy."""
    progress = Progress()
    watchdog = Watchdog(progress, 1.5, 0, 1, None, lambda: None, left)
    end = time.monotonic() + 2.5
    while time.monotonic() < end:
        progress.now("F0.0@0")
        time.sleep(0.01)
    watchdog.stop()
    assert not left.happened() and capsys.readouterr().err == ""


def test_stopped_it_leaves_no_thread_behind(left: Left) -> None:
    before = threading.active_count()
    Watchdog(Progress(), 300, 0, 1, None, lambda: None, left).stop()
    assert threading.active_count() == before and not left.happened()


def test_without_its_store_it_tells_of_itself_and_leaves(left: Left, capsys: pytest.CaptureFixture[str]) -> None:
    """The store's server goes with the process that hosts it."""
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("localhost", server.port, is_master=False)
    progress = Progress()
    progress.now("B0.3@0")
    Watchdog(progress, SECONDS, 1, 2, client, lambda: None, left)
    del server
    assert left.wait() == 1
    text = capsys.readouterr().err
    assert re.search(table(SECONDS, r"rank 1: B0\.3@0, unchanged for \S+ s"), text), text


# ---- two ranks and more ----


def watched(rank: int, world: int, moving: int | None, silent: int | None) -> tuple[int | None, str]:
    """How a rank leaves and what its watchdog says. The `moving` rank does not stall; the `silent` has no watchdog."""
    store = dist.distributed_c10d._get_default_store()
    if rank == silent:
        store.wait(["over"])
        return None, ""
    left, progress = Left(), Progress()
    progress.now(f"F{rank}.0@0")
    with contextlib.redirect_stderr(io.StringIO()) as said:
        Watchdog(progress, SECONDS, rank, world, store, lambda: None, left)
        while rank == moving and not left.happened():
            progress.count += 1
            time.sleep(0.01)
        code = left.wait()
    store.set("over", "")
    return code, said.getvalue()


@pytest.mark.parametrize("moving", [None, 0])
def test_one_rank_prints_a_table_of_all(moving: int | None, pool: Callable[[int], Pool]) -> None:
    codes, texts = zip(*pool(3).run(watched, moving, None), strict=True)
    assert codes == (1, 1, 1)
    rows = [rf"rank {rank}: F{rank}\.0@0, unchanged for \S+ s" for rank in range(3)]
    assert [bool(re.search(table(SECONDS, *rows), text)) for text in texts].count(True) == 1, texts
    assert ["no progress" in text for text in texts].count(True) == 1, texts
    # Every rank leaves, and shows where it stands.
    for rank, text in enumerate(texts):
        assert f"rank {rank} stands" in text and "in watched" in text, text


def test_a_rank_that_does_not_answer_is_named(pool: Callable[[int], Pool]) -> None:
    codes, texts = zip(*pool(3).run(watched, None, 0), strict=True)
    assert codes == (None, 1, 1)
    rows = [rf"rank {rank}: F{rank}\.0@0, unchanged for \S+ s" for rank in (1, 2)]
    silent = r"rank 0: no answer \(its process is gone or stuck outside Python\)"
    assert re.search(table(SECONDS, silent, *rows), "".join(texts)), texts
