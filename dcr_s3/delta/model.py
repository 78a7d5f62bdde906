"""How likely a cell of each class is to change: what a clock-coded block's header says, and how it is chosen.

Any model decodes, so all of this is the encoder's choice and floating point is safe here.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from dcr_s3.delta.tables import CLASSES, CLOCK_BITS, HAZARDS, MAX_UNIT_BITS, MIN_UNIT_BITS
from dcr_s3.errors import CorruptObject

_LOG_STEP = math.log(65535) / 254
_HAZARDS: list[int] = HAZARDS.tolist()
_HALVED = 0x80
_LIKELIEST = 1 - 2.0**-24
_SMALLEST = 2.0**-30
_TAIL_SHARE = 0.01
"""The lowest exponents that together hold this share of the changes are one class: nearly all of their cells change."""


@dataclass(frozen=True)
class Tally:
    """Cells and changed cells per old exponent, of a whole block or of a sample."""

    cells: Sequence[float]
    changed: Sequence[float]
    sampled: bool

    @property
    def density(self) -> float:
        """Share of the cells that changed."""
        return sum(self.changed) / max(sum(self.cells), 1)

    def folded(self, first: int) -> Tally:
        """The same by class, for classes from exponent ``first``."""
        return Tally(_fold(self.cells, first), _fold(self.changed, first), self.sampled)

    def merged(self) -> Tally:
        """The same without distinction."""
        return Tally([sum(self.cells)], [sum(self.changed)], self.sampled)

    def shares(self) -> list[float]:
        """Chance of a change per entry. A sample that saw no change in an entry does not prove that there is none."""
        if not self.sampled:
            return [
                dead / max(alive, dead) if dead else 0.0 for alive, dead in zip(self.cells, self.changed, strict=True)
            ]
        unseen = 0.5 / self.density
        pairs = zip(self.cells, self.changed, strict=True)
        return [(dead + 0.5) / (alive + 1) if dead else 0.5 / (alive + unseen) for alive, dead in pairs]


@dataclass(frozen=True)
class HazardModel:
    """Hazards of a block: ``codes`` index HAZARDS, in units of 2**-``unit_bits`` bit.

    One code: every cell has this hazard. Sixteen: a cell whose old exponent field is e has the hazard of class
    min(max(e - ``first_exponent``, 0), 15).
    """

    unit_bits: int
    first_exponent: int
    codes: bytes
    halved: bool = False
    """The positions of the block's two halves are coded apart, so that a decoder can work on both at once."""

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
        units = self.unit_bits | _HALVED * self.halved
        if len(self.codes) == 1:
            return struct.pack("<B", units) + self.codes
        return struct.pack("<BH", units, self.first_exponent) + self.codes

    @classmethod
    def unpack(cls, header: bytes, classes: int) -> HazardModel:
        """Inverse of :meth:`pack`, for 1 or 16 classes. Raises CorruptObject on values outside the format."""
        units, first = struct.unpack_from("<BH", header) if classes > 1 else (header[0], 0)
        unit_bits = units & ~_HALVED
        if not MIN_UNIT_BITS <= unit_bits <= MAX_UNIT_BITS:
            raise CorruptObject(f"a block counts hazards in units of 2**-{unit_bits} bit")
        return cls(unit_bits, first, header[-classes:], bool(units & _HALVED))

    @staticmethod
    def header_bytes(classes: int) -> int:
        """Length of the packed header."""
        return 2 if classes == 1 else 3 + classes


def free_model(tally: Tally) -> HazardModel:
    """One hazard for all cells."""
    return _quantised(tally.merged(), 0)


def context_model(tally: Tally) -> HazardModel:
    """A hazard per class."""
    running = list(accumulate(tally.changed))
    first = min(bisect_left(running, _TAIL_SHARE * running[-1]), max(len(running) - CLASSES, 0))
    return _quantised(tally.folded(first), first)


def position_bits(model: HazardModel, tally: Tally) -> float:
    """About how many bits ``model`` takes for the positions, per cell of a block like ``tally``."""
    classes = len(model.codes)
    by_class = (
        tally.folded(model.first_exponent) if classes > 1 else Tally([sum(tally.cells)], [sum(tally.changed)], True)
    )
    bits = 0.0
    for alive, dead, code in zip(by_class.cells, by_class.changed, model.codes, strict=True):
        hazard = _HAZARDS[code] / (1 << model.unit_bits)
        bits += max(alive - dead, 0) * hazard
        if dead:
            bits -= dead * math.log2(-math.expm1(-hazard * math.log(2)))
    return bits / max(sum(by_class.cells), 1)


def _fold(counts: Sequence[float], first: int) -> list[float]:
    top = first + CLASSES - 1
    classes = [sum(counts[: first + 1]), *counts[first + 1 : top], sum(counts[top:])]
    return classes + [0] * (CLASSES - len(classes))


def _quantised(tally: Tally, first: int) -> HazardModel:
    """The model for a tally per class. A class that cannot change has no hazard."""
    ideal = [-math.log2(1 - min(share, _LIKELIEST)) for share in tally.shares()]
    finest = math.floor(16 - math.log2(max(*ideal, _SMALLEST)))
    unit_bits = min(max(finest, MIN_UNIT_BITS), MAX_UNIT_BITS)
    codes = [_code(hazard * (1 << unit_bits)) if hazard else 0 for hazard in ideal]
    return HazardModel(unit_bits, first, bytes(codes))


def _code(hazard: float) -> int:
    """The code whose hazard, in the same units, is nearest in ratio."""
    return 1 + min(round(math.log(max(hazard, 1.0)) / _LOG_STEP), 254)
