"""Loss spikes: a loss far above what the last steps' were, by a statistic that one odd step does not move."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Final

_LEAST: Final = 10  # losses, before anything is called a spike
_NORMAL: Final = 1.4826  # of a normal distribution: deviation / median absolute deviation
_FLOOR: Final = 1e-3  # of the median: where losses hardly move, rounding is no spike


class Spikes:
    """Looks at every step's loss beside the last `window` ones. `threshold` None: never a spike."""

    def __init__(self, window: int, threshold: float | None) -> None:
        self._threshold = threshold
        self._losses: deque[float] = deque(maxlen=window)

    def see(self, loss: float) -> str | None:
        """What to say of a spike; None where there is none. Losses that are not finite are left out."""
        if self._threshold is None or not math.isfinite(loss):
            return None
        said = None
        if len(self._losses) >= min(_LEAST, self._losses.maxlen or 0):
            middle = statistics.median(self._losses)
            spread = _NORMAL * statistics.median(abs(seen - middle) for seen in self._losses)
            deviations = (loss - middle) / max(spread, _FLOOR * abs(middle))
            if deviations > self._threshold:
                said = (
                    f"loss spike: {loss:.4f} is {deviations:.1f} deviations above {middle:.4f}, the median of the last "
                    f"{len(self._losses)} steps (log.spike_threshold {self._threshold:g})"
                )
        self._losses.append(loss)
        return said
