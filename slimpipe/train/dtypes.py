"""What `train.dtype` names."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import torch

DTYPES: Final = MappingProxyType({"float32": torch.float32, "bfloat16": torch.bfloat16})
