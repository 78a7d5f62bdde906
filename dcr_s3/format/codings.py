"""How a block's changes are written: one number per block, so that codings can be added without a new format."""

from __future__ import annotations

from enum import IntEnum


class Coding(IntEnum):
    """Numbers are part of the format and never reused."""

    NONE = 0
    """No cell changed; the payload is empty."""
    DENSE_XOR = 1
    """zstd of old XOR new, every cell of the block."""
    DENSE_PLAIN = 2
    """zstd of the new cells, every cell of the block."""
    CLOCK_FREE = 3
    """Hazard clock with one hazard; positions and steps can be parsed without the old cells."""
    CLOCK_CONTEXT = 4
    """Hazard clock with a hazard per exponent class of the old cells."""
