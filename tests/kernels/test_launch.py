"""A kernel's code is looked up once for all that it depends on, and launched with what Triton itself was given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slimpipe.kernels.triton.launch import Launcher

F32, BF16 = (torch.empty(4, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))


class Code:
    """What Triton gives back of a launch: launched again by itself, with all arguments by position."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments: self.launches.append((grid, *arguments))


class Kernel:
    """A kernel as `triton.jit` makes it. `code` None: as in the interpreter."""

    def __init__(self, interpreted: bool = False) -> None:
        self.interpreted = interpreted
        self.launches: list[tuple[Any, ...]] = []
        self.codes: list[Code] = []

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, num_warps: int) -> Code | None:
            self.launches.append((grid, *arguments, num_warps))
            self.codes.append(Code())
            return None if self.interpreted else self.codes[-1]

        return launch


def test_a_second_launch_goes_by_the_handle_with_arguments_of_its_own() -> None:
    kernel = Kernel()
    launch = Launcher(kernel)
    launch((2, 1, 1), (F32, None), (5, 0.5), (64, True), num_warps=4)
    launch((9, 3, 1), (F32.clone(), None), (7, 0.25), (64, True), num_warps=4)
    assert kernel.launches == [((2, 1, 1), F32, None, 5, 0.5, 64, True, 4)]
    [(grid, tensor, *rest)] = kernel.codes[0].launches
    assert grid == (9, 3, 1) and tensor is not F32 and rest == [None, 7, 0.25, 64, True]


@pytest.mark.parametrize(
    "other",
    [
        ((BF16, F32), (64,), 4),
        ((F32, BF16), (64,), 4),
        ((F32, None), (64,), 4),
        ((F32, F32), (128,), 4),
        ((F32, F32), (64,), 8),
        ((F32.to("meta"), F32), (64,), 4),
    ],
    ids=["first", "second", "none", "constant", "warps", "device"],
)
def test_what_code_depends_on_has_code_of_its_own(other: tuple[Any, Any, int], monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    launch = Launcher(kernel)
    # Without a GPU all devices are -1.
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 1 if tensor.is_meta else 0)
    for _ in range(2):
        for tensors, constants, warps in (((F32, F32), (64,), 4), other):
            launch((1, 1, 1), tensors, (1,), constants, num_warps=warps)
    assert len(kernel.launches) == 2
    assert [len(code.launches) for code in kernel.codes] == [1, 1]


def test_without_code_triton_launches_every_time() -> None:
    kernel = Kernel(interpreted=True)
    launch = Launcher(kernel)
    for _ in range(3):
        launch((1, 1, 1), (F32,), (), (), num_warps=1)
    assert len(kernel.launches) == 3
