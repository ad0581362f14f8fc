"""What a person sees while a run goes on."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from slimpipe.config import Config, load_config
from slimpipe.train.display import NoDisplay, PlainDisplay, RichDisplay, make_display, memory, numbers
from slimpipe.train.metrics import StepRecord
from tests.end_to_end.launch import QUICKSTART

RECORD = StepRecord(
    step=7,
    loss=4.25,
    grad_norm=1.5,
    lr=1e-3,
    seconds=0.5,
    tokens_per_s=98765.4,
    tflops=412.34,
    mfu=0.417,
    bubble=0.125,
    bubble_by_rank=(0.15, 0.1),
    waits={"B": 0.1},
    peak_memory_bytes_by_rank=(100 * 2**30, 90 * 2**30),
    busy_seconds_by_rank=(0.4, 0.45),
    exchange=None,
    skipped=False,
    notes=(),
)


def config(*overrides: str) -> Config:
    return load_config(QUICKSTART, ["train.steps=12", *overrides])


def test_a_line_every_so_many_steps_and_one_for_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    display = PlainDisplay(12, 5)
    for step in range(1, 13):
        display.step(replace(RECORD, step=step, tflops=None, mfu=None))
    display.note("step 12: a note")
    display.close()
    *lines, note = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["5/12", "10/12", "12/12"]
    assert lines[0] == "step  5/12  loss 4.2500  grad norm 1.500  98,765 tokens/s  idle 12.5%"
    assert note == "step 12: a note"


def test_rates_of_the_device_where_its_peak_is_known() -> None:
    assert numbers(RECORD).endswith("  98,765 tokens/s  412.3 TFLOP/s a device  MFU 41.7%  idle 12.5%")
    assert numbers(replace(RECORD, mfu=None)).endswith("  412.3 TFLOP/s a device  idle 12.5%")
    assert "  0.021 TFLOP/s a device  " in numbers(replace(RECORD, tflops=0.0213, mfu=None))
    assert "grad norm 1.500  skipped  98,765" in numbers(replace(RECORD, skipped=True))


def test_memory_of_each_rank_and_of_many_the_extremes() -> None:
    assert memory(RECORD.peak_memory_bytes_by_rank) == "memory GiB by rank  100.0 90.0"
    many = tuple((50 + (rank == 9) - (rank == 60)) * 2**30 for rank in range(64))
    assert memory(many) == "memory GiB  51.0 on rank 9, the fullest, 49.0 on rank 60"


@pytest.mark.parametrize("width", [80, 140])
def test_the_live_lines_show_everything_at_any_width(width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, color_system=None)
    display = RichDisplay(12, 1, console)
    display.step(RECORD)
    display.note("step 7: loss spike")
    display.close()
    text = " ".join(out.getvalue().replace("\r", " ").split())
    assert "7/12" in text and "left" in text and "step 7: loss spike" in text
    for part in ("loss 4.2500", "98,765 tokens/s", "412.3 TFLOP/s", "MFU 41.7%", "idle 12.5%", "rank 100.0 90.0"):
        assert part in text, text


def test_the_time_left_of_a_resumed_run_goes_by_its_own_pace() -> None:
    """1000 steps were done before; two more, half a second apart, leave 7 s for 14 others."""
    now = 100.0
    display = RichDisplay(1016, 1, Console(file=io.StringIO(), force_terminal=True))
    display._progress.get_time = lambda: now
    display._progress.tasks[0]._get_time = lambda: now
    for step in (1000, 1001, 1002):
        display.step(replace(RECORD, step=step))
        now += 0.5
    assert display._progress.tasks[0].time_remaining == pytest.approx(7, abs=1)
    display.close()


def test_who_shows_what() -> None:
    assert isinstance(make_display(config(), lead=False), NoDisplay)
    assert isinstance(make_display(config("log.display=none"), lead=True), NoDisplay)
    # Not a terminal here.
    assert isinstance(make_display(config("log.display=auto"), lead=True), PlainDisplay)
    rich = make_display(config("log.display=rich"), lead=True)
    assert isinstance(rich, RichDisplay)
    rich.close()
