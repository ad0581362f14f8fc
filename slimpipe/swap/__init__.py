"""Swapping of activations to host memory: a library for any eager PyTorch training loop (docs/swap.md).

    from slimpipe.swap import SwapManager

The user's page is docs/swap.md. Correctness lies in `mover.py` alone: whatever profile, policy and stages come up
with, an unpacked tensor is there and right. The pipeline's engine moves by units of its schedule (`UnitSwaps`).
"""

from slimpipe.swap.manager import SwapManager
from slimpipe.swap.settings import SwapSettings
from slimpipe.swap.simulated_streams import SimulatedStreams
from slimpipe.swap.stages import Stage
from slimpipe.swap.units import UnitSwaps

__all__ = ["SimulatedStreams", "Stage", "SwapManager", "SwapSettings", "UnitSwaps"]
