"""What random positions cost at least."""

from __future__ import annotations

from math import log2


def position_bits(ratio: float) -> float:
    """Bits per change that say where the changes are, if a share ``ratio`` of all cells changes at random places."""
    if not 0 < ratio < 1:
        return 0.0
    return (-ratio * log2(ratio) - (1 - ratio) * log2(1 - ratio)) / ratio
