"""What a person sees of a run: the lines before it, the display, TensorBoard's events."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from slimpipe.config import Config, load_config
from slimpipe.train.display import NoDisplay, PlainDisplay, RichDisplay, make_display
from slimpipe.train.main import describe
from slimpipe.train.metrics import MetricsFile
from slimpipe.train.session import Session
from tests.end_to_end.launch import QUICKSTART
from tests.numerics.harness import case, config_of

ROW = SimpleNamespace(loss=4.25, grad_norm=1.5, bubble=0.125)


def config(*overrides: str) -> Config:
    return load_config(QUICKSTART, ["train.steps=12", *overrides])


def test_a_line_every_so_many_steps_and_one_for_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    display = PlainDisplay(12, 5)
    for step in range(1, 13):
        display.step(step, ROW, 1234.5)
    display.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["5/12", "10/12", "12/12"]
    assert lines[0] == "step  5/12  loss 4.2500  grad norm 1.500  1,234 tokens/s  idle 12.5%"


def test_the_live_line_shows_the_steps_numbers_on_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(
        "slimpipe.train.display.Console",
        lambda file: Console(file=out, force_terminal=True, width=80, color_system=None),
    )
    display = RichDisplay(12, 1)
    display.step(7, ROW, 98765.0)
    display.close()
    last = [line for line in out.getvalue().replace("\r", "\n").splitlines() if "7/12" in line][-1]
    assert "loss 4.2500  98,765 tokens/s  idle 12.5%" in last


def test_who_shows_what() -> None:
    assert isinstance(make_display(config(), lead=False), NoDisplay)
    assert isinstance(make_display(config("log.display=none"), lead=True), NoDisplay)
    # Not a terminal here.
    assert isinstance(make_display(config("log.display=auto"), lead=True), PlainDisplay)
    rich = make_display(config("log.display=rich"), lead=True)
    assert isinstance(rich, RichDisplay)
    rich.close()


@pytest.mark.parametrize(("layers", "uneven"), [(6, False), (7, True)])
def test_uneven_placement_is_said(layers: int, uneven: bool) -> None:
    settings = config_of(case(v=2, n=2), model={"layers": layers})
    said = describe(settings, Session(settings))
    assert f"layers by stage: {[4, 3] if uneven else [3, 3]}" in said
    assert ("uneven: the layers do not divide by the stages" in said) == uneven
    assert "vocabulary whole" in said and "exchange off" in said


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    file = MetricsFile(tmp_path, tensorboard=True)
    for step in (1, 2):
        file.write({"step": step, "loss": 5.0 / step, "waits": {"F": 0.1}})
    file.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 5.0), (2, 2.5)]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
