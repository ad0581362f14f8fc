"""A range of a storage's bytes, copied elsewhere, gives back every view with its values, sizes and strides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slimpipe.swap.geometry import ALIGNMENT, Layout, bytes_of, range_to_move, view_of


def there_and_back(tensor: Tensor) -> tuple[Tensor, int, int]:
    storage = tensor.untyped_storage()
    layout = Layout.of(tensor)
    begin, end = range_to_move(layout, storage.nbytes())
    copied = bytes_of(storage, begin, end).clone()
    return view_of(copied.untyped_storage(), layout, begin), begin, end


@st.composite
def views(draw: Any) -> Tensor:
    base = torch.arange(4096, dtype=torch.float32)
    dims = draw(st.integers(1, 4))
    sizes = [draw(st.integers(1, 6)) for _ in range(dims)]
    strides = [draw(st.integers(0, 40)) for _ in range(dims)]
    last = sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    return base.as_strided(sizes, strides, draw(st.integers(0, 4095 - last)))


@given(views())
def test_any_strides(tensor: Tensor) -> None:
    found, begin, end = there_and_back(tensor)
    assert torch.equal(found, tensor) and found.stride() == tensor.stride()
    assert found.data_ptr() % 16 == tensor.data_ptr() % 16 or begin == 0
    whole = (0, tensor.untyped_storage().nbytes())
    assert (begin, end) == whole or (begin % ALIGNMENT == 0 and 2 * (end - begin) < whole[1] + 2 * ALIGNMENT)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float64, torch.complex128, torch.bool, torch.int64, torch.uint8]
)
def test_every_width(dtype: torch.dtype) -> None:
    base = (torch.arange(3000) % 7).to(dtype)
    for tensor in (base, base[5:], base[1000:1400:3], base.view(60, 50).t(), base[2900:].view(10, 10)):
        found, *_ = there_and_back(tensor)
        assert torch.equal(found, tensor) and found.stride() == tensor.stride() and found.dtype == dtype


def test_large_views_move_the_storage_and_small_ones_a_copy() -> None:
    base = torch.randn(64, 64)
    assert range_to_move(Layout.of(base[:40]), 64 * 64 * 4) == (0, 64 * 64 * 4)
    assert range_to_move(Layout.of(base[:, 3]), 64 * 64 * 4) == (0, 64 * 64 * 4)
    begin, end = range_to_move(Layout.of(base[40:44]), 64 * 64 * 4)
    assert (begin, end) == (40 * 256, 44 * 256)
