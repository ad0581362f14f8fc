"""The measured choice of an attention backend: the fastest, kept in a file, made anew where anything differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slimpipe.kernels.attention import AttentionBackend, PlainAttention
from slimpipe.kernels.attention.fastest import AttentionShape, _blocks, fastest
from slimpipe.train.attention import shape_of
from tests.numerics.harness import case, config_of
from tests.support.fake_flash import BottomRight

SHAPE = AttentionShape(1, 64, 256, 4, 2, 8, "bfloat16")
VERSIONS = {"device": "some GPU", "torch": "2.11"}


class Named(PlainAttention):
    def __init__(self, name: str) -> None:
        self.name = name


class Timed:
    """A timer with given times; counts what it measured. A time of None fails."""

    def __init__(self, **times: float | None) -> None:
        self.times, self.measured = times, 0

    def __call__(self, backend: AttentionBackend, shape: AttentionShape) -> float:
        self.measured += 1
        time = self.times[backend.name]
        if time is None:
            raise RuntimeError("no kernel for this shape")
        return time

    @property
    def candidates(self) -> dict[str, Callable[[], AttentionBackend]]:
        return {name: (lambda name=name: Named(name)) for name in self.times}  # type: ignore[misc]


def test_the_fastest_is_taken_and_remembered(tmp_path: Path) -> None:
    timer = Timed(cudnn=3.0, flash=9.0, flash4=2.5)
    first = fastest(SHAPE, timer.candidates, VERSIONS, tmp_path / "cache", timer)
    assert (first.name, first.cached, timer.measured) == ("flash4", False, 3)
    assert str(first) == "flash4 (measured: cudnn 3.00 ms, flash 9.00 ms, flash4 2.50 ms)"
    again = fastest(SHAPE, timer.candidates, VERSIONS, tmp_path / "cache", timer)
    assert (again.name, again.cached, again.milliseconds, timer.measured) == ("flash4", True, first.milliseconds, 3)
    (file,) = (tmp_path / "cache").iterdir()
    assert file.suffix == ".json"


@pytest.mark.parametrize("change", ["shape", "versions", "candidates", "damaged", "other"])
def test_what_differs_is_measured_anew(change: str, tmp_path: Path) -> None:
    timer = Timed(cudnn=3.0, flash=2.0)
    fastest(SHAPE, timer.candidates, VERSIONS, tmp_path, timer)
    shape: Any = replace(SHAPE, past=512) if change == "shape" else SHAPE
    versions = VERSIONS | ({"torch": "2.12"} if change == "versions" else {})
    later = Timed(cudnn=1.0, flash=2.0, **({"flash4": 4.0} if change == "candidates" else {}))
    (file,) = tmp_path.iterdir()
    if change == "damaged":
        file.write_text(file.read_text()[:40])
    if change == "other":  # the name of a backend that was not asked for
        file.write_text(file.read_text().replace('"name": "flash"', '"name": "flash9"'))
    assert fastest(shape, later.candidates, versions, tmp_path, later).name == "cudnn"
    assert later.measured == len(later.times)


def test_what_fails_is_left_out_and_told(tmp_path: Path) -> None:
    timer = Timed(cudnn=None, flash=5.0)
    choice = fastest(SHAPE, timer.candidates, VERSIONS, tmp_path, timer)
    assert str(choice) == "flash (measured: cudnn failed, flash 5.00 ms)"
    timer = Timed(cudnn=None, flash=None)
    with pytest.raises(
        RuntimeError, match="no backend runs here; cudnn: RuntimeError: no kernel for this shape; flash"
    ):
        fastest(replace(SHAPE, d=9), timer.candidates, VERSIONS, tmp_path, timer)


def test_one_candidate_is_not_measured_and_no_folder_does_no_harm(tmp_path: Path) -> None:
    timer = Timed(plain=1.0)
    assert fastest(SHAPE, timer.candidates, VERSIONS, tmp_path, timer).name == "plain"
    assert timer.measured == 0 and not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    timer = Timed(cudnn=3.0, flash=2.0)
    assert fastest(SHAPE, timer.candidates, VERSIONS, tmp_path / "file" / "under", timer).name == "flash"


def test_blocks_that_are_timed_are_a_slices() -> None:
    assert _blocks(PlainAttention(), SHAPE) == [((256, 320), True), ((0, 256), False)]
    assert _blocks(BottomRightBackend(), SHAPE) == [((0, 320), True)]
    assert _blocks(PlainAttention(), replace(SHAPE, past=0)) == [((0, 64), True)]


class BottomRightBackend(BottomRight):
    bottom_right = True


def test_the_shape_of_a_run_is_a_slice_in_mid_sequence() -> None:
    assert shape_of(config_of(case(n=4, micro_batch=2))) == AttentionShape(2, 16, 32, 4, 2, 8, "float32")
    assert shape_of(config_of(case(n=1))).past == 0
