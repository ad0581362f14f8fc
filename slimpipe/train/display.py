"""What a person sees while a run goes on: live lines on a terminal, a plain line a step elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from slimpipe.train.metrics import StepRecord

if TYPE_CHECKING:
    from slimpipe.config import Config

_MOST_RANKS = 12
"""Whose memory is shown by itself; of more, the fullest and the emptiest."""


class Display(Protocol):
    def step(self, record: StepRecord) -> None: ...

    def note(self, text: str) -> None:
        """A line that stays."""
        ...

    def close(self) -> None: ...


class NoDisplay:
    """Ranks other than the first, and `log.display: none`."""

    def step(self, record: StepRecord) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class PlainDisplay:
    """One line every `log.every` steps, and one for the last."""

    def __init__(self, steps: int, every: int) -> None:
        self._steps, self._every = steps, every

    def step(self, record: StepRecord) -> None:
        step = record.step
        if step % self._every == 0 or step == self._steps:
            print(f"step {step:>{len(str(self._steps))}}/{self._steps}  {numbers(record)}", flush=True)

    def note(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None:
        pass


class RichDisplay:
    """A progress bar with the time left, the step's numbers, and the memory of each rank."""

    def __init__(self, steps: int, every: int, console: Console | None = None) -> None:
        self._every = every
        self._progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        self._task = self._progress.add_task("", total=steps)
        self._live = Live(
            self._lines(None),
            console=console or Console(file=sys.stdout),
            refresh_per_second=4,
        )
        self._live.start()

    def step(self, record: StepRecord) -> None:
        # The pace is taken from the second update on: neither the slow first step is in it, nor those of a run that was
        # resumed.
        self._progress.update(self._task, completed=record.step)
        if record.step % self._every == 0:
            self._live.update(self._lines(record))

    def note(self, text: str) -> None:
        self._live.console.print(Text(text))

    def close(self) -> None:
        self._live.stop()

    def _lines(self, record: StepRecord | None) -> Group:
        if record is None:
            return Group(self._progress)
        return Group(self._progress, Text(numbers(record)), Text(memory(record.peak_memory_bytes_by_rank)))


def numbers(record: StepRecord) -> str:
    """The step's numbers on one line; rates of the device's peak where that is known."""
    compute = ""
    if record.tflops is not None:
        compute = f"{record.tflops:,.1f}" if record.tflops >= 1 else f"{record.tflops:.2g}"
        compute += " TFLOP/s a device  "
    compute += "" if record.mfu is None else f"MFU {record.mfu:.1%}  "
    update = "skipped  " if record.skipped else ""
    return (
        f"loss {record.loss:.4f}  grad norm {record.grad_norm:.3f}  {update}{record.tokens_per_s:,.0f} tokens/s  "
        f"{compute}idle {record.bubble:.1%}"
    )


def memory(peaks: tuple[int, ...]) -> str:
    """Peak memory by rank, in GiB."""
    gib = [peak / 2**30 for peak in peaks]
    if len(gib) <= _MOST_RANKS:
        return "memory GiB by rank  " + " ".join(f"{size:.1f}" for size in gib)
    most, least = (pick(range(len(gib)), key=lambda rank: gib[rank]) for pick in (max, min))
    return f"memory GiB  {gib[most]:.1f} on rank {most}, the fullest, {gib[least]:.1f} on rank {least}"


def make_display(config: Config, lead: bool) -> Display:
    """By `log.display`; `auto` is rich on a terminal and plain elsewhere, plain too where every action is traced."""
    kind = config.log.display
    if not lead or kind == "none":
        return NoDisplay()
    if kind == "auto":
        kind = "rich" if sys.stdout.isatty() and not config.pipeline.trace else "plain"
    make = RichDisplay if kind == "rich" else PlainDisplay
    return make(config.train.steps, config.log.every)
