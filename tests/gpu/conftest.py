"""Tests that measure memory must not find what the one before left in reference cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _empty_device() -> Iterator[None]:
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
    yield
