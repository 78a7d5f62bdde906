"""The hazard clock's tables, against exact integer arithmetic."""

from __future__ import annotations

import random

from dcr_s3.delta.tables import CLOCK_BITS, HAZARDS, ROUND_CLOCK, SURVIVAL, TOTAL_BITS, survival


def is_nearest(value: int, base: int, numerator: int, denominator: int, scale: int) -> bool:
    """Whether ``value`` is ``scale * base ** (numerator / denominator)`` rounded, by comparing integer powers."""
    target = (2 * scale) ** denominator * base ** max(numerator, 0)
    divisor = base ** max(-numerator, 0)
    return (2 * value - 1) ** denominator * divisor <= target <= (2 * value + 1) ** denominator * divisor


def test_survival_is_exact() -> None:
    for step, value in enumerate(SURVIVAL.tolist()):
        assert is_nearest(value, 2, -step, 256, 1 << TOTAL_BITS)


def test_hazards_are_exact() -> None:
    assert HAZARDS[0] == 0
    for code in range(1, 256):
        assert is_nearest(int(HAZARDS[code]), 65535, code - 1, 254, 1)


def test_survival_falls_with_every_unit_of_clock() -> None:
    draw = random.Random(0)
    seams = [octave << CLOCK_BITS for octave in range(1, 8)] + [step << 16 for step in range(1, 2048)]
    for clock in seams + [draw.randrange(1, ROUND_CLOCK) for _ in range(20000)]:
        assert survival(clock - 1) > survival(clock) > survival(clock + 1)
    assert survival(0) == 1 << TOTAL_BITS
    assert survival(ROUND_CLOCK) == 1 << TOTAL_BITS - 8
