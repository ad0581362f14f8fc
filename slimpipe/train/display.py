"""What a person sees while a run goes on: a live line on a terminal, a plain line a step elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

if TYPE_CHECKING:
    from slimpipe.config import Config


class Row(Protocol):
    """What is shown of a step."""

    @property
    def loss(self) -> float: ...
    @property
    def grad_norm(self) -> float: ...
    @property
    def bubble(self) -> float: ...


class Display(Protocol):
    def step(self, step: int, row: Row, tokens_per_s: float) -> None: ...

    def close(self) -> None: ...


class NoDisplay:
    """Ranks other than the first, and `log.display: none`."""

    def step(self, step: int, row: Row, tokens_per_s: float) -> None:
        pass

    def close(self) -> None:
        pass


class PlainDisplay:
    """One line every `log.every` steps, and one for the last."""

    def __init__(self, steps: int, every: int) -> None:
        self._steps, self._every = steps, every

    def step(self, step: int, row: Row, tokens_per_s: float) -> None:
        if step % self._every == 0 or step == self._steps:
            print(f"step {step:>{len(str(self._steps))}}/{self._steps}  {_numbers(row, tokens_per_s)}", flush=True)

    def close(self) -> None:
        pass


class RichDisplay:
    """A progress bar with the step's numbers and the time left."""

    def __init__(self, steps: int, every: int) -> None:
        self._every = every
        self._progress = Progress(
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TextColumn("{task.description}", table_column=Column(no_wrap=True, min_width=44)),
            TimeRemainingColumn(),
            console=Console(file=sys.stdout),
        )
        self._task = self._progress.add_task("", total=steps)
        self._progress.start()

    def step(self, step: int, row: Row, tokens_per_s: float) -> None:
        self._progress.update(self._task, completed=step)
        if step % self._every == 0:
            numbers = f"loss {row.loss:.4f}  {tokens_per_s:,.0f} tokens/s  idle {row.bubble:.1%}"
            self._progress.update(self._task, description=numbers)

    def close(self) -> None:
        self._progress.stop()


def _numbers(row: Row, tokens_per_s: float) -> str:
    return f"loss {row.loss:.4f}  grad norm {row.grad_norm:.3f}  {tokens_per_s:,.0f} tokens/s  idle {row.bubble:.1%}"


def make_display(config: Config, lead: bool) -> Display:
    """By `log.display`; `auto` is rich on a terminal and plain elsewhere, plain too where every action is traced."""
    kind = config.log.display
    if not lead or kind == "none":
        return NoDisplay()
    if kind == "auto":
        kind = "rich" if sys.stdout.isatty() and not config.pipeline.trace else "plain"
    make = RichDisplay if kind == "rich" else PlainDisplay
    return make(config.train.steps, config.log.every)
