"""How likely a cell of each class is to change: what a clock-coded block's header says, and how it is chosen."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dcr_s3.delta.tables import CLASSES, CLOCK_BITS, HAZARDS, MAX_UNIT_BITS, MIN_UNIT_BITS
from dcr_s3.errors import CorruptObject

Counts = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]

_LIKELIEST = 1 - 2.0**-24
_LOG_STEP = math.log(65535) / 254


@dataclass(frozen=True)
class HazardModel:
    """Hazards of a block: ``codes`` index HAZARDS, in units of 2**-``unit_bits`` bit.

    One code: every cell has this hazard. Sixteen: a cell whose old exponent field is e has the hazard of class
    min(max(e - ``first_exponent``, 0), 15).
    """

    unit_bits: int
    first_exponent: int
    codes: bytes

    @property
    def hazards(self) -> npt.NDArray[np.uint16]:
        """Hazard of each class, in units of 2**-``unit_bits`` bit (uint16)."""
        return HAZARDS[np.frombuffer(self.codes, np.uint8)]

    @property
    def shift(self) -> int:
        """Left shift that turns a hazard into clock units."""
        return CLOCK_BITS - self.unit_bits

    def pack(self) -> bytes:
        """Header bytes: 2 for one class, 19 for sixteen."""
        if len(self.codes) == 1:
            return struct.pack("<B", self.unit_bits) + self.codes
        return struct.pack("<BH", self.unit_bits, self.first_exponent) + self.codes

    @classmethod
    def unpack(cls, header: bytes, classes: int) -> HazardModel:
        """Inverse of :meth:`pack`, for 1 or 16 classes. Raises CorruptObject on values outside the format."""
        unit_bits, first = struct.unpack_from("<BH", header) if classes > 1 else (header[0], 0)
        if not MIN_UNIT_BITS <= unit_bits <= MAX_UNIT_BITS:
            raise CorruptObject(f"a block counts hazards in units of 2**-{unit_bits} bit")
        return cls(unit_bits, first, header[-classes:])

    @staticmethod
    def header_bytes(classes: int) -> int:
        """Length of the packed header."""
        return 2 if classes == 1 else 3 + classes


def free_model(cells: int, changed: int) -> tuple[HazardModel, float]:
    """One hazard for all cells, and the bits that the positions will take."""
    return _quantise(np.array([float(cells)]), np.array([float(changed)]), 0)


def context_model(cells: Counts, changed: Counts) -> tuple[HazardModel, float]:
    """A hazard per class, and the bits that the positions will take.

    ``cells`` and ``changed`` count, per old exponent, cells (an estimate) and changed cells (exact).
    """
    alive = np.maximum(cells, changed).astype(np.float64)
    dead = changed.astype(np.float64)
    first = _first_exponent(alive, dead)
    fold = np.clip(np.arange(len(alive)) - first, 0, CLASSES - 1)
    alive, dead = (np.bincount(fold, weights, CLASSES).astype(np.float64) for weights in (alive, dead))
    return _quantise(alive, dead, first)


def _first_exponent(cells: _Floats, changed: _Floats) -> int:
    """The first of the sixteen exponents that keep apart best: those below and above join the outermost classes."""
    exponents = len(cells)
    if exponents <= CLASSES:
        return 0
    own = np.cumsum(_entropy_bits(cells, changed))
    low = _entropy_bits(np.cumsum(cells), np.cumsum(changed))
    high = _entropy_bits(np.cumsum(cells[::-1])[::-1], np.cumsum(changed[::-1])[::-1])
    firsts = exponents - CLASSES + 1
    middle = own[CLASSES - 2 : CLASSES - 2 + firsts] - own[:firsts]
    return int(np.argmin(low[:firsts] + middle + high[CLASSES - 1 :]))


def _entropy_bits(cells: _Floats, changed: _Floats) -> _Floats:
    """Bits to say which ``changed`` of ``cells`` changed."""
    kept = cells - changed
    return _log_product(cells, cells) - _log_product(changed, changed) - _log_product(kept, kept)


def _log_product(factor: _Floats, value: _Floats) -> _Floats:
    product: _Floats = factor * np.log2(np.maximum(value, 1e-300))
    return product


def _quantise(cells: _Floats, changed: _Floats, first: int) -> tuple[HazardModel, float]:
    """Codes and unit with the least bits for these counts per class."""
    share = np.minimum(changed / np.maximum(cells, 1.0), _LIKELIEST)
    ideal = -np.log2(1.0 - share)
    units = np.arange(MIN_UNIT_BITS, MAX_UNIT_BITS + 1)[:, None]
    steps = np.log(np.maximum(np.ldexp(ideal, units), 1.0)) / _LOG_STEP
    codes: npt.NDArray[Any] = np.where(changed > 0, 1 + np.minimum(np.rint(steps), 254), 0).astype(np.uint8)
    hazards = np.ldexp(HAZARDS[codes].astype(np.float64), -units)
    odds = np.where(changed > 0, -np.expm1(-hazards * math.log(2)), 1.0)
    bits = ((cells - changed) * hazards - changed * np.log2(odds)).sum(axis=1)
    best = int(np.argmin(bits))
    return HazardModel(MIN_UNIT_BITS + best, first, codes[best].tobytes()), float(bits[best])
