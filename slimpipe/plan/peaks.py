"""What devices compute at most, for MFU: dense, without sparsity, by the vendors' data sheets, in TFLOP/s."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Final

# The first that a device's name contains, as whole words, counts: longer ones stand first.
_BFLOAT16: Final = MappingProxyType(
    {
        "GB300": 2500.0,
        "GB200": 2500.0,
        "B300": 2250.0,
        "B200": 2250.0,
        "GH200": 989.0,
        "H200 NVL": 835.0,
        "H200": 989.0,
        "H100 NVL": 835.0,
        "H100 PCIe": 756.0,
        "H100": 989.0,
        "H800": 989.0,
        "H20": 148.0,
        "A100": 312.0,
        "A800": 312.0,
        "A40": 149.7,
        "A30": 165.0,
        "A10G": 70.0,
        "L40S": 362.0,
        "L40": 181.0,
        "L4": 121.0,
    }
)


def peak_tflops(device: str, dtype: str) -> float | None:
    """Of one device by the name its driver gives; None where it is not known, or the dtype is not bfloat16."""
    if dtype != "bfloat16":
        return None
    return next((peak for name, peak in _BFLOAT16.items() if re.search(rf"\b{name}\b", device)), None)
