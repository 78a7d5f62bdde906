"""Fixed tables of the hazard clock, computed with exact decimals so that every machine has the same."""

from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Decimal, localcontext

import numpy as np
import numpy.typing as npt

CLASSES = 16
"""Classes of old exponents that may have hazards of their own."""

CLOCK_BITS = 24
"""A clock is counted in units of 2**-24 bit."""

ROUND_CLOCK = 8 << CLOCK_BITS
"""Clock after which a coder writes that nothing changed and starts over."""

TOTAL_BITS = 36
"""Cumulative frequencies of the clock's distribution are out of 2**36."""

MIN_UNIT_BITS, MAX_UNIT_BITS = 14, 24
"""Hazards are counted in units of 2**-14 to 2**-24 bit, as a block's header says."""


def _exact(base: int, numerator: int, denominator: int, scale: int) -> int:
    """``scale * base ** (numerator / denominator)``, rounded to the nearest integer."""
    with localcontext() as context:
        context.prec = 60
        power = Decimal(scale) * Decimal(base) ** (Decimal(numerator) / Decimal(denominator))
        return int(power.to_integral_value(ROUND_HALF_EVEN))


def _survival() -> npt.NDArray[np.uint64]:
    values = [_exact(2, -step, 256, 1 << TOTAL_BITS) for step in range(257)]
    return np.array(values, np.uint64)


def _hazards() -> npt.NDArray[np.uint16]:
    values = [0] + [_exact(65535, code - 1, 254, 1) for code in range(1, 256)]
    return np.array(values, np.uint16)


SURVIVAL = _survival()
"""257 values: 2**36 * 2**(-k/256), the distribution's upper tail at k/256 bit of clock."""

HAZARDS = _hazards()
"""256 values: the hazard that a one-byte code stands for, 0 and then 1 to 65535 in equal ratios."""


def survival(clock: int) -> int:
    """Upper tail at ``clock`` (0 to ROUND_CLOCK units), out of 2**36: linear between table steps."""
    step, fraction = (clock >> 16) & 255, clock & 0xFFFF
    upper, lower = int(SURVIVAL[step]), int(SURVIVAL[step + 1])
    return (upper - ((upper - lower) * fraction >> 16)) >> (clock >> CLOCK_BITS)
